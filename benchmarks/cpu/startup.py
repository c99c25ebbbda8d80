"""Measure the time from the command to a ready server, relative to a lower bound.

The lower bound is measured in its own process, which imports torch and reads every tensor of the
model into memory. Both sides alternate, with the files in the page cache. Run as `python -m
benchmarks.cpu.startup --model FOLDER`; it prints the figures and writes them to
docs/benchmarks/startup.md.
"""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from gllm.models.hub import resolve_model
from gllm.sim.metrics.report import format_table, show_value

AIM = 1.5
FLOOR = """
import time
begin = time.perf_counter()
import torch
imported = time.perf_counter()
import sys
from safetensors import safe_open
loaded = time.perf_counter()
for path in sys.argv[1:]:
    with safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name).clone() for name in file.keys()]
print(imported - begin, time.perf_counter() - loaded)
"""
READY = "is ready"
"""Text in the line that the server logs when it accepts requests."""


def floor(files: Sequence[Path]) -> tuple[float, float]:
    """Return the seconds to import torch and the seconds to read the files."""
    command = [sys.executable, "-c", FLOOR, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported, read = map(float, done.stdout.split())
    return imported, read


def ready(folder: Path, flags: Sequence[str]) -> float:
    """Return the seconds from the command to the ready server.

    Raises:
        RuntimeError: The server exited before it was ready.
    """
    command = [sys.executable, "-m", "gllm.serve", str(folder), "--port", "0", *flags]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            # The log line has the time without polling; the next line has the URL.
            for line in server.stderr:
                if READY in line:
                    seconds = time.perf_counter() - begin
                    break
            else:
                raise RuntimeError(f"the server ended with {server.wait()}")
            url = server.stderr.readline().split()[2].replace("/v1/chat/completions", "/ready")
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.status == 200, "it said that it was ready"
        finally:
            server.terminate()
            server.stderr.read()
    return seconds


def measure(folder: Path, stages: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure both sides in turns, after one turn that fills the page cache."""
    files = sorted(folder.glob("*.safetensors"))
    floors: list[tuple[float, float]] = []
    servers: dict[int, list[float]] = {count: [] for count in stages}
    foreign = ForeignCpu()
    for turn in range(rounds + 1):
        floors.append(floor(files))
        for count in stages:
            servers[count].append(ready(folder, ["--pp", str(count)]))
        if turn == 0:
            floors.clear()
            for times in servers.values():
                times.clear()
    return {
        "import_seconds": median(imported for imported, _ in floors),
        "read_seconds": median(read for _, read in floors),
        "floor_seconds": median(map(sum, floors)),
        "ready_seconds": {str(count): median(times) for count, times in servers.items()},
        "ratios": {
            str(count): median(s / sum(f) for s, f in zip(times, floors, strict=True))
            for count, times in servers.items()
        },
        "foreign_cores": foreign.cores(),
    }


def format_page(results: dict[str, Any], rounds: int) -> str:
    """Format the figures in words and a table."""
    rows = [
        [
            stages,
            show_value(results["ready_seconds"][stages]),
            show_value(results["floor_seconds"]),
            f"{ratio:.2f} ({'met' if ratio <= AIM else '**missed**'})",
        ]
        for stages, ratio in results["ratios"].items()
    ]
    return "\n\n".join(
        [
            f"{origin('benchmarks.cpu.startup')} Rounds: {rounds}, medians; others used "
            f"{results['foreign_cores']:.2f} cores. "
            f"Floor: {show_value(results['import_seconds'])} s to "
            f"import torch and {show_value(results['read_seconds'])} s to read the weights.",
            format_table(["stages", "command to ready, s", "floor, s", f"ratio, aim {AIM}"], rows),
        ]
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "startup", rounds=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    results = measure(resolve_model(options.model), options.stages, options.rounds)
    title = "From the command to a ready server"
    write_results(options.output, title, format_page(results, options.rounds), results)


if __name__ == "__main__":
    main()
