"""llama.cpp's own benchmark of batches, `llama-batched-bench`, which has to be on the PATH.

It draws its prompts itself, and times prefill and decode apart.
"""

import json
import os
import statistics
import subprocess

from benchmarks.cpu.drivers.timing import (
    Task,
    decode_name,
    prefill_name,
    row,
    task,
    write,
)
from benchmarks.cpu.watch import CpuWatch


def speeds(given: Task, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """(prompt tokens, output tokens) a second of one batch, in a process of its own."""
    command = ["llama-batched-bench", "-m", given.model, "--output-format", "jsonl"]
    command += ["-t", str(given.threads), "-tb", str(given.threads), "-fa", "auto"]
    command += ["-c", str(batch * (prompt + new) + 256), "-b", "2048"]
    command += ["-npp", str(prompt), "-ntg", str(new), "-npl", str(batch)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    (line,) = (each for each in out.splitlines() if each.startswith("{"))
    figures = json.loads(line)
    return figures["speed_pp"], figures["speed_tg"]


def main() -> None:
    given = task()
    rows = []
    for size in given.batches:
        cpu = CpuWatch(os.getpid())
        rates = [speeds(given, size, given.prompt, given.new)[1] for _ in range(given.repeats)]
        rows.append(row(decode_name(size), statistics.median(rates), cpu.foreign()))
    for length in given.prefills:
        cpu = CpuWatch(os.getpid())
        rates = [speeds(given, 1, length, 1)[0] for _ in range(given.repeats)]
        rows.append(row(prefill_name(length), statistics.median(rates), cpu.foreign()))
    write(given, rows)


if __name__ == "__main__":
    main()
