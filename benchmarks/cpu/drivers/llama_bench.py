"""Driver of llama.cpp's own batch benchmark, `llama-batched-bench`, which must be on the PATH.

The benchmark generates its own prompts, and times prefill and decode separately.
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


def speeds(spec: Task, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """Return (prompt tokens, output tokens) per second of one batch, in a new process."""
    command = ["llama-batched-bench", "-m", spec.model, "--output-format", "jsonl"]
    command += ["-t", str(spec.threads), "-tb", str(spec.threads), "-fa", "auto"]
    command += ["-c", str(batch * (prompt + new) + 256), "-b", "2048"]
    command += ["-npp", str(prompt), "-ntg", str(new), "-npl", str(batch)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    (line,) = (each for each in out.splitlines() if each.startswith("{"))
    figures = json.loads(line)
    return figures["speed_pp"], figures["speed_tg"]


def main() -> None:
    """Run the task on the command line."""
    spec = task()
    rows = []
    for size in spec.batches:
        cpu = CpuWatch(os.getpid())
        rates = [speeds(spec, size, spec.prompt, spec.new)[1] for _ in range(spec.repeats)]
        rows.append(row(decode_name(size), statistics.median(rates), cpu.foreign()))
    for length in spec.prefills:
        cpu = CpuWatch(os.getpid())
        rates = [speeds(spec, 1, length, 1)[0] for _ in range(spec.repeats)]
        rows.append(row(prefill_name(length), statistics.median(rates), cpu.foreign()))
    write(spec, rows)


if __name__ == "__main__":
    main()
