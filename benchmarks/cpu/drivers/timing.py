"""How an engine is timed in its own process, the same way for all of them.

Owns the task that a driver is given, the batches, and what is written of them. Knows no engine, and
needs nothing but the standard library: drivers run in the peers' environments.

A driver is `python -m benchmarks.cpu.drivers.NAME TASK`, TASK being a JSON object of Task's fields.
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
"""Serves a batch: greedily so many new tokens for each prompt, whatever they are."""
FIRST_ID, LAST_ID = 1_059, 151_935
"""Of the tokens in prompts."""


@dataclass(frozen=True)
class Task:
    """What a driver has to do."""

    model: str
    """What the peer loads."""
    weights: str
    """bf16 or int8."""
    threads: int
    kv_bytes: int
    batches: list[int]
    """Sizes of those that are decoded."""
    prompt: int
    new: int
    prefills: list[int]
    """Lengths of those that are prefilled alone."""
    repeats: int
    output: str
    """The file for the rows."""

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""
        return max(self.prompt + self.new, *self.prefills) + 1


def task() -> Task:
    """The task on the command line."""
    return Task(**json.loads(sys.argv[1]))


def decode_name(batch: int) -> str:
    """The cell of a batch that is decoded."""
    return f"decode b={batch}"


def prefill_name(length: int) -> str:
    """The cell of one prompt that is prefilled."""
    return f"prefill {length}"


def row(cell: str, tokens_per_second: float, foreign: float) -> dict[str, Any]:
    """What is written of a cell; foreign: strangers' share (0..1) of all cores."""
    figures = {"tokens_per_second": tokens_per_second}
    return {"cell": cell, "figures": figures, "foreign": foreign}


def measure(given: Task, generate: Generate) -> None:
    """Run all batches of the task and write their rows.

    Decoding is what a batch of `new` tokens takes more than one of a single token: the latter ends
    with prefill. Both are medians of the repeats, after a warm-up.
    """
    rng = random.Random(0)

    def seconds(batch: int, length: int, new: int) -> float:
        prompts = [rng.choices(range(FIRST_ID, LAST_ID + 1), k=length) for _ in range(batch)]
        begin = time.perf_counter()
        generate(prompts, new)
        return time.perf_counter() - begin

    def median(*batch: int) -> float:
        return statistics.median(seconds(*batch) for _ in range(given.repeats))

    rows = []
    for size in given.batches:
        seconds(size, given.prompt, given.new)
        cpu = CpuWatch(os.getpid())
        first = median(size, given.prompt, 1)
        rest = median(size, given.prompt, given.new) - first
        rows.append(row(decode_name(size), size * (given.new - 1) / rest, cpu.foreign()))
    for length in given.prefills:
        seconds(1, length, 1)
        cpu = CpuWatch(os.getpid())
        rows.append(row(prefill_name(length), length / median(1, length, 1), cpu.foreign()))
    write(given, rows)


def write(given: Task, rows: list[dict[str, Any]]) -> None:
    """The task's result."""
    Path(given.output).write_text(json.dumps(rows), encoding="utf-8")
