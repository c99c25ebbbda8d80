"""Measure how often a recomputed text differs from an undisturbed one, per configuration on CPUs.

Sequences of the demo model are prefilled and decoded together. Then each is recomputed as after the
death of a worker: its prompt and the tokens emitted up to a random cut pass again as prefill chunks
of random sizes, several sequences per step, and decoding goes on. Tokens are sampled at temperature
1 with one random number per sequence and index, so a text differs only if its logits do. Each
configuration runs in its own process. Run as `python -m benchmarks.batch_invariance`; it prints the
table and writes it to docs/batch-invariance.md.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu.page import origin, write_figures
from gllm.config.engine import EngineConfig
from gllm.kernels.attention_plan import PagedBatch
from gllm.kernels.random_numbers import random_uniform
from gllm.kernels.threads import set_num_threads
from gllm.models.config import read_config
from gllm.models.hub import resolve_model
from gllm.models.stage import StageInputs
from gllm.runtime.worker.batch import plan_windows
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.sim.metrics.report import format_table
from gllm.text.tokenizer import Tokenizer

PROMPTS = (
    "Once upon a time",
    "There was once a fox",
    "Not far from here",
    "The little boat was",
    "One morning the bear",
    "In the garden there was a",
    "The old man said",
    "She looked at the moon and",
)
NUM_TOKENS = 48
"""Tokens generated per sequence."""
BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 16, 5
MAX_CHUNK = 24
"""Largest prefill chunk of a recomputation, in tokens."""
CHUNKS_PER_STEP = 3


class Case(msgspec.Struct, frozen=True):
    """One configuration: its row's name, engine options and GLLM_CPU_KERNELS."""

    name: str
    options: dict[str, Any]
    kernels: str = ""
    """Value of GLLM_CPU_KERNELS; empty: unset."""


CASES = (
    *(Case(f"{dtype}", {"dtype": dtype}) for dtype in ("float32", "bfloat16", "float16")),
    Case("int8 weights, bfloat16", {"dtype": "bfloat16", "quantization": "int8"}),
    *(
        Case(f"KV cache in {cached}, {dtype}", {"dtype": dtype, "kv_cache_dtype": cached})
        for cached in ("fp8", "int8")
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Case(f"--attention-backend torch, {dtype}", {"dtype": dtype, "attention_backend": "torch"})
        for dtype in ("float32", "bfloat16")
    ),
    Case(
        "--attention-backend torch, KV cache in fp8, float32",
        {"dtype": "float32", "attention_backend": "torch", "kv_cache_dtype": "fp8"},
    ),
    *(
        Case(f"GLLM_CPU_KERNELS=off, {dtype}", {"dtype": dtype}, "off")
        for dtype in ("float32", "bfloat16")
    ),
)


@dataclass
class Counts:
    """Result of a case."""

    positions: int = 0
    differing_positions: int = 0
    largest_difference: float = 0.0
    """Over all logits of all positions."""
    texts: int = 0
    differing_texts: int = 0


class Model:
    """The demo model's only stage, and a KV cache with room for a number of sequences."""

    def __init__(self, folder: Path, options: dict[str, Any], num_sequences: int) -> None:
        config = read_config(folder)
        engine = EngineConfig.from_options(str(folder), block_size=BLOCK_SIZE, **options)
        layers = range(config.model.num_layers)
        self.executor = CpuExecutor(config, engine, 1, layers)
        self.executor.load(folder, lambda done, total: None)
        self.num_blocks = num_sequences * BLOCKS_PER_SEQUENCE
        self.executor.allocate(self.num_blocks, BLOCK_SIZE)
        self.lengths = np.zeros(num_sequences, dtype=np.int64)

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths[:] = 0

    def run(self, rows: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Compute the next tokens of some sequences, decodes first; return each row's logits."""
        owners = np.array([sequence for sequence, _ in rows])
        counts = np.array([len(tokens) for _, tokens in rows])
        begin = self.lengths[owners]
        self.lengths[owners] += counts
        table = owners[:, None] * BLOCKS_PER_SEQUENCE + np.arange(BLOCKS_PER_SEQUENCE)
        start = np.concatenate(([0], counts.cumsum()))
        decodes = int((counts == 1).cumprod().sum())
        batch = PagedBatch(table, start, begin + counts, decodes, BLOCK_SIZE, self.num_blocks)
        executor = self.executor
        plans = plan_windows(batch, executor.dtype, executor._windows, backend=executor.backend)
        positions = [np.arange(b, b + c) for b, c in zip(begin, counts, strict=True)]
        inputs = StageInputs(
            torch.tensor([token for _, tokens in rows for token in tokens]),
            torch.from_numpy(np.concatenate(positions)),
            plans,
        )
        with torch.inference_mode():
            hidden = executor._stage.forward(inputs, None, executor._cache.layers)
            logits = executor._stage.compute_logits(hidden)
        return list(logits.split(counts.tolist()))


def sample(logits: Tensor, sequence: int, index: int) -> int:
    """Return output token `index` of a sequence by its own random number."""
    counters = torch.tensor([[sequence], [0], [index]])
    number = random_uniform(*counters)
    cumulative = logits.to(torch.float64).softmax(dim=-1).cumsum(dim=-1)
    return int(torch.searchsorted(cumulative, number * cumulative[-1]))


def decode(
    model: Model, outputs: list[list[int]], logits: list[Tensor], keep: list[list[Tensor]] | None
) -> None:
    """Sample and decode until each output has NUM_TOKENS tokens; `logits` are those of the next."""
    while True:
        rows = []
        for sequence, output in enumerate(outputs):
            if len(output) < NUM_TOKENS:
                if keep is not None:
                    keep[sequence].append(logits[sequence])
                output.append(sample(logits[sequence], sequence, len(output)))
            if len(output) < NUM_TOKENS:
                rows.append((sequence, output[-1:]))
        if not rows:
            return
        for (sequence, _), result in zip(rows, model.run(rows), strict=True):
            logits[sequence] = result[-1]


def recompute(model: Model, texts: list[list[int]], chooser: random.Random) -> list[Tensor]:
    """Compute texts in random prefill chunks, some sequences per step; return their logits."""
    results: list[list[Tensor]] = [[] for _ in texts]
    while open_texts := [s for s, text in enumerate(texts) if model.lengths[s] < len(text)]:
        rows = []
        for sequence in chooser.sample(open_texts, min(CHUNKS_PER_STEP, len(open_texts))):
            begin = int(model.lengths[sequence])
            tokens = texts[sequence][begin : begin + chooser.randint(1, MAX_CHUNK)]
            rows.append((sequence, tokens))
        rows.sort(key=lambda row: len(row[1]) > 1)
        for (sequence, _), result in zip(rows, model.run(rows), strict=True):
            results[sequence].append(result)
    return [torch.cat(parts) for parts in results]


def measure_round(model: Model, prompts: list[list[int]], chooser: random.Random) -> Counts:
    """Generate undisturbed, recompute from random cuts, compare logits and texts."""
    every = range(len(prompts))
    model.reset()
    kept: list[list[Tensor]] = [[] for _ in every]
    wanted: list[list[int]] = [[] for _ in every]
    first = [result[-1] for result in model.run([(s, prompts[s]) for s in every])]
    decode(model, wanted, first, kept)
    cuts = [chooser.randrange(1, NUM_TOKENS) for _ in every]
    model.reset()
    logits = recompute(model, [prompts[s] + wanted[s][: cuts[s]] for s in every], chooser)
    counts = Counts(texts=len(prompts))
    for s in every:
        undisturbed = torch.stack(kept[s][: cuts[s] + 1])
        difference = (logits[s][len(prompts[s]) - 1 :] - undisturbed).abs().amax(dim=1)
        counts.positions += len(difference)
        counts.differing_positions += int((difference > 0).sum())
        counts.largest_difference = max(counts.largest_difference, float(difference.max()))
    outputs = [wanted[s][: cuts[s]] for s in every]
    decode(model, outputs, [each[-1] for each in logits], None)
    counts.differing_texts = sum(a != b for a, b in zip(outputs, wanted, strict=True))
    return counts


def measure(
    case: Case, num_sequences: int, rounds: int, model_class: type[Model] = Model
) -> Counts:
    """Return the counts of a case over all rounds, in this process."""
    # Threads would only wait for each other, and results do not depend on their number.
    set_num_threads(1)
    folder = resolve_model("demo")
    tokenizer = Tokenizer.load(folder)
    model = model_class(folder, case.options, num_sequences)
    chooser = random.Random(0)
    total = Counts()
    for _ in range(rounds):
        texts = [chooser.choice(PROMPTS) for _ in range(num_sequences)]
        counts = measure_round(model, [tokenizer.encode(text) for text in texts], chooser)
        total.positions += counts.positions
        total.differing_positions += counts.differing_positions
        total.largest_difference = max(total.largest_difference, counts.largest_difference)
        total.texts += counts.texts
        total.differing_texts += counts.differing_texts
    return total


def measure_apart(case: Case, options: argparse.Namespace) -> Counts:
    """Return the counts of a case, measured by a process of its own."""
    flags = ["--sequences", str(options.sequences), "--rounds", str(options.rounds)]
    command = [sys.executable, "-m", __spec__.name, *flags, "--case", case.name]
    environment = {key: value for key, value in os.environ.items() if key != "GLLM_CPU_KERNELS"}
    if case.kernels:
        environment["GLLM_CPU_KERNELS"] = case.kernels
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Counts(**json.loads(done.stdout))


def format_row(case: Case, counts: Counts) -> list[str]:
    """Return the table's row of a case."""
    return [
        case.name,
        f"{counts.differing_positions:,} of {counts.positions:,}",
        f"{counts.largest_difference:.1e}" if counts.differing_positions else "0",
        f"{counts.differing_texts} of {counts.texts}",
    ]


def main() -> None:
    """Measure every case, print the table and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--case", help="measure this row only and print its counts as JSON")
    parser.add_argument("--output", type=Path, default=Path("docs/batch-invariance.md"))
    options = parser.parse_args()
    if options.case is not None:
        (case,) = (case for case in CASES if case.name == options.case)
        print(json.dumps(vars(measure(case, options.sequences, options.rounds))))
        return
    rows = []
    for case in CASES:
        rows.append(format_row(case, measure_apart(case, options)))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    header = ["configuration", "positions that differ", "largest difference", "texts that differ"]
    figures = f"{origin('benchmarks.batch_invariance')}\n\n{format_table(header, rows)}"
    write_figures(options.output, "Batch invariance", figures)
    print(figures)


if __name__ == "__main__":
    main()
