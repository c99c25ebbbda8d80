"""Linear maps in float32, in bfloat16 and with 8-bit weights and activations, in one run.

The maps are those of a model, each kind with as many copies of a weight as no cache holds, so that
weights come from memory as they do when a model decodes. All kinds take turns, so that a busy
machine slows all of them. Run as `python -m benchmarks.cpu.linear`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from gllm.kernels.linear import linear, prepare
from gllm.kernels.linear_int8 import linear_int8, prepare_int8
from gllm.runtime.device import cores, set_threads

SHAPES = {
    "qkv": (896, 1152),
    "out": (896, 896),
    "gate-up": (896, 9728),
    "down": (4864, 896),
    "head": (896, 151936),
}
"""(inputs, outputs) in Qwen2.5-0.5B."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
HEAD_ROWS = 256
"""Most rows that the LM head computes at once."""
UNCACHED_BYTES = 200 << 20
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass
class Kind:
    """One number format: a product by each of the copies in turn."""

    multiply: Callable[[Tensor, Tensor], object]
    copies: Iterator[object]


def product(kind: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x to x W^T, W in this format."""
    if kind == "int8":
        small = prepare_int8(weight)
        return lambda x: linear_int8(x, small, None)
    matrix = prepare(weight.to(getattr(torch, kind)))
    return lambda x: linear(x, matrix, None)


def bandwidth(rounds: int = 5) -> float:
    """Bytes read in a second by all threads, at best."""
    numbers = torch.ones(1 << 27, dtype=torch.int32)
    best = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        numbers.max()
        best = max(best, numbers.nbytes / (time.perf_counter() - begin))
    return best


def seconds(multiply: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Time of one product."""
    begin = time.perf_counter()
    multiply(x)
    return time.perf_counter() - begin


def measure(inputs: int, outputs: int, rows: list[int], kinds: list[str], budget: float) -> None:
    """Print the lines of a shape."""
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    copies = {}
    for kind in kinds:
        count = 1 + UNCACHED_BYTES // (inputs * outputs * BYTES[kind])
        copies[kind] = cycle([product(kind, weight) for _ in range(count)])
    for count in rows:
        xs = {kind: torch.randn(count, inputs, dtype=_input(kind)) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(times[kinds[-1]]) < 5:
            for kind in kinds:
                times[kind].append(seconds(next(copies[kind]), xs[kind]))
        cells = []
        for kind in kinds:
            median = statistics.median(times[kind])
            stored, work = inputs * outputs * BYTES[kind], 2 * count * inputs * outputs
            cells.append(
                f"{median * 1e6:.0f} | {stored / median / 1e9:.1f} | {work / median / 1e9:.0f}"
            )
        print(f"| {inputs} x {outputs} | {count} | {' | '.join(cells)} |", flush=True)


def _input(kind: str) -> torch.dtype:
    return torch.float32 if kind == "float32" else torch.bfloat16


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kinds", default="float32,bfloat16,int8")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(SHAPES), help="their names")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    set_threads(args.threads)
    kinds = args.kinds.split(",")
    with torch.inference_mode():
        print(f"{args.threads} threads, memory {bandwidth() / 1e9:.1f} GB/s\n")
        heads = " | ".join(f"{kind} us | GB/s | GOP/s" for kind in kinds)
        print(f"| weight | rows | {heads} |\n|{' --- |' * (2 + 3 * len(kinds))}")
        for name, (inputs, outputs) in SHAPES.items():
            if name not in args.shapes.split(","):
                continue
            rows = [int(r) for r in args.rows.split(",")]
            rows = [r for r in rows if name != "head" or r <= HEAD_ROWS]
            measure(inputs, outputs, rows, kinds, args.seconds)
        print(f"\nmemory {bandwidth() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
