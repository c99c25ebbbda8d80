"""Timing of an engine in its own process, the same for all engines.

A driver is `python -m benchmarks.cpu.drivers.NAME TASK`; TASK is a JSON object of Task's fields.
This module needs only the standard library, because drivers run in the peers' environments.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.watch import CpuWatch

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]
"""Function that generates this many greedy tokens for each prompt of a batch, ignoring end tokens.
"""
FIRST_ID, LAST_ID = 1_059, 151_935
"""Range of the token ids in prompts."""


@dataclass(frozen=True)
class Task:
    """Task of a driver."""

    model: str
    """Path of the peer's model files."""
    weights: str
    """bf16, int8, int4, or a type of GGUF."""
    threads: int
    kv_bytes: int
    batches: list[int]
    """Sizes of the batches that are decoded."""
    prompt: int
    new: int
    prefills: list[int]
    """Lengths of the prompts that are prefilled alone."""
    repeats: int
    output: str
    """Path of the file for the rows."""

    @property
    def longest(self) -> int:
        """Maximum tokens per sequence."""
        return max(self.prompt + self.new, *self.prefills) + 1


def task() -> Task:
    """Parse the task from the command line."""
    return Task(**json.loads(sys.argv[1]))


def decode_name(batch: int) -> str:
    """Return the cell's name for a decode batch."""
    return f"decode b={batch}"


def prefill_name(length: int) -> str:
    """Return the cell's name for the prefill of one prompt."""
    return f"prefill {length}"


def row(cell: str, tokens_per_second: float, foreign: float) -> dict[str, Any]:
    """Return the JSON object of a cell.

    Args:
        cell: Name of the cell.
        tokens_per_second: Measured speed.
        foreign: CPU share (0..1) of all cores that other processes used.
    """
    figures = {"tokens_per_second": tokens_per_second}
    return {"cell": cell, "figures": figures, "foreign": foreign}


def measure(spec: Task, generate: Generate, clock: Callable[[], float] = time.perf_counter) -> None:
    """Run all batches of the task and write their rows; `clock` returns seconds.

    Decode time is the time of a batch with `new` tokens less that of the same batch with a single
    token, which ends with prefill. Both are medians of the repeats, after a warm-up.
    """
    rng = random.Random(0)

    def seconds(batch: int, length: int, new: int) -> float:
        prompts = [rng.choices(range(FIRST_ID, LAST_ID + 1), k=length) for _ in range(batch)]
        begin = clock()
        generate(prompts, new)
        return clock() - begin

    def median(*batch: int) -> float:
        return statistics.median(seconds(*batch) for _ in range(spec.repeats))

    rows = []
    for size in spec.batches:
        seconds(size, spec.prompt, spec.new)
        cpu = CpuWatch(os.getpid())
        first = median(size, spec.prompt, 1)
        rest = median(size, spec.prompt, spec.new) - first
        rows.append(row(decode_name(size), size * (spec.new - 1) / rest, cpu.foreign()))
    for length in spec.prefills:
        seconds(1, length, 1)
        cpu = CpuWatch(os.getpid())
        rows.append(row(prefill_name(length), length / median(1, length, 1), cpu.foreign()))
    write(spec, rows)


def write(spec: Task, rows: list[dict[str, Any]]) -> None:
    """Write the rows to the task's output file."""
    Path(spec.output).write_text(json.dumps(rows), encoding="utf-8")
