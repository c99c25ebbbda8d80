"""Compare linear layers in float32, bfloat16 and int8 in one run.

int8 means 8-bit weights and activations. The shapes are those of a model. Each format has more
copies of a weight than any cache holds, so that weights come from memory as in a model's decode.
All formats alternate, so that a busy machine slows all of them. Run as `python -m
benchmarks.cpu.linear`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.linear import linear, prepare
from gllm.kernels.threads import set_num_threads
from gllm.runtime.worker.device import count_cores

SHAPES = {
    "qkv": (896, 1152),
    "out": (896, 896),
    "gate-up": (896, 9728),
    "down": (4864, 896),
    "head": (896, 151936),
}
"""(inputs, outputs) of the linear layers of Qwen2.5-0.5B."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
HEAD_ROWS = 256
"""Maximum rows that the LM head computes at once."""
UNCACHED_BYTES = 200 << 20
FORMATS = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes per weight by format. The int8 format quantizes bfloat16 activations."""

Product = Callable[[Tensor], Tensor]


def products(name: str, weight: Tensor) -> list[Product]:
    """Return functions that compute x W^T in this format, each with its own copy of W."""
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    quantization = "int8" if name == "int8" else "none"

    def copy() -> Product:
        matrix = prepare(weight.to(dtype, copy=True), quantization)
        return lambda x: linear(x.to(dtype), matrix, None)

    return [copy() for _ in range(1 + UNCACHED_BYTES // (weight.numel() * FORMATS[name]))]


def bandwidth(rounds: int = 5) -> float:
    """Return the best read bandwidth of all threads, in bytes per second."""
    # numpy asks for large pages: some machines read small ones at half the speed.
    numbers = torch.from_numpy(np.ones(1 << 27, dtype=np.int32))
    return numbers.nbytes / min(seconds(torch.max, numbers) for _ in range(rounds))


def seconds(multiply: Product, x: Tensor) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    multiply(x)
    return time.perf_counter() - begin


def line(maps: dict[str, "cycle[Product]"], weights: int, x: Tensor, budget: float) -> list[str]:
    """Return microseconds, GB/s of weights and GOP/s of each format: medians.

    Args:
        maps: Copies of the linear layer by format.
        weights: Number of weights.
        x: Input in bfloat16.
        budget: Seconds to measure.
    """
    xs = {name: x.float() if name == "float32" else x for name in maps}
    times: dict[str, list[float]] = {name: [] for name in maps}
    end, least = time.perf_counter() + budget, 5
    while time.perf_counter() < end or least > 0:
        least -= 1
        for name, copies in maps.items():
            times[name].append(seconds(next(copies), xs[name]))
    cells = []
    for name, measured in times.items():
        median = statistics.median(measured)
        rates = weights * FORMATS[name] / median / 1e9, 2 * len(x) * weights / median / 1e9
        cells += [f"{median * 1e6:.0f}", f"{rates[0]:.1f}", f"{rates[1]:.0f}"]
    return cells


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per line")
    parser.add_argument("--threads", type=int, default=count_cores())
    args = parser.parse_args()
    set_num_threads(args.threads)
    print(f"{args.threads} threads, memory read at {bandwidth() / 1e9:.1f} GB/s\n")
    heads = [f"{name}, us | GB/s | GOP/s" for name in args.formats]
    print(f"| map | rows | {' | '.join(heads)} |\n|{' --- |' * (2 + 3 * len(heads))}")
    for shape in args.shapes:
        inputs, outputs = SHAPES[shape]
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        maps = {name: cycle(products(name, weight)) for name in args.formats}
        for rows in args.rows:
            if shape != "head" or rows <= HEAD_ROWS:
                x = torch.randn(rows, inputs, dtype=torch.bfloat16)
                cells = line(maps, weight.numel(), x, args.seconds)
                print(f"| {shape} | {rows} | {' | '.join(cells)} |", flush=True)
    print(f"\nmemory read at {bandwidth() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
