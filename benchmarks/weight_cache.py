"""Measure what a cache of packed weights saves: loading, starting, and memory of further engines.

A random model in the shape of Qwen2.5-0.5B is written to a temporary folder unless `--model` names
one. For each format it measures, in turns without and with the cache: the seconds in which a worker
of the first of two stages loads its weights, the seconds from the command to a ready server, tokens
per second of one stream, and the PSS of one, two and three servers of one stage. Run as
`python -m benchmarks.weight_cache`; it prints the figures and writes them to the page of
`--output`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from benchmarks.cpu.serving import free_port
from benchmarks.cpu.startup import ready
from benchmarks.cpu.watch import pss_bytes, tree
from gllm.models.hub import resolve_model
from gllm.sim.metrics.report import format_table

FORMATS = ("none", "int8", "int4")
"""Values of --quantization."""
NUM_ENGINES = 3
AIM_BYTES = 150_000_000
"""Most PSS that the workers of a further engine should add, beyond its KV cache."""
FLAGS = (
    "--threads",
    "1",
    "--device",
    "cpu",
    "--kv-cache-memory",
    "32MiB",
    "--max-model-len",
    "1024",
)
NUM_TOKENS = 64
"""Tokens of the stream that is timed."""
START_SECONDS = 600.0
LOAD = """
import sys, time
from pathlib import Path
from gllm.config.engine import EngineConfig
from gllm.kernels.threads import set_num_threads
from gllm.models.config import read_config
from gllm.runtime.worker.cpu.executor import CpuExecutor
folder, quantization, cache = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None
set_num_threads(1)
begin, cpu_begin = time.perf_counter(), time.process_time()
model = read_config(folder)
config = EngineConfig.from_options(
    str(folder), quantization=quantization, max_model_len=1024, weight_cache=cache
)
layers = range(model.model.num_layers // 2)
executor = CpuExecutor(model, config, 2, layers)
executor.load(folder, lambda done, total: None)
print(time.perf_counter() - begin, time.process_time() - cpu_begin)
"""


def measure_load(folder: Path, quantization: str, cache: Path | None) -> tuple[float, float]:
    """Return the time in which a worker loads the first of two stages, after its imports.

    Returns:
        Seconds, and seconds of CPU time, which other programs prolong less.
    """
    arguments = [str(folder), quantization, "" if cache is None else str(cache)]
    command = [sys.executable, "-c", LOAD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, cpu_seconds = map(float, done.stdout.split())
    return seconds, cpu_seconds


@contextmanager
def run_server(folder: Path, flags: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run a server; yield its process id and its URL once it is ready.

    Raises:
        RuntimeError: it ended before.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "gllm.serve", str(folder), "--port", str(port), *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _is_ready(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server is not ready: {server.poll()}")
                time.sleep(0.1)
            yield server.pid, url
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(url: str, num_tokens: int) -> tuple[str, float]:
    """Return the text of a greedy completion, and the seconds that it took."""
    body = {"prompt": [300, 301], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text, time.perf_counter() - begin


def measure_memory(folder: Path, flags: Sequence[str]) -> dict[str, list[int]]:
    """Return the PSS of one server, of two, and so on, in bytes: of all processes, of the workers.

    Each has completed a request.
    """
    sizes: dict[str, list[int]] = {"all": [], "workers": []}
    pids: list[int] = []
    with ExitStack() as servers:
        for _ in range(NUM_ENGINES):
            pid, url = servers.enter_context(run_server(folder, flags))
            complete(url, 8)
            pids += tree(pid)
            workers = [each for each in pids if b"gllm-stage" in _title(each)]
            sizes["all"].append(pss_bytes(pids))
            sizes["workers"].append(pss_bytes(workers))
    return sizes


def _title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def measure_format(folder: Path, quantization: str, rounds: int, cache: Path) -> dict[str, Any]:
    """Measure one format. Raises RuntimeError if a text differs."""
    alone = [*FLAGS, "--quantization", quantization]
    flags = ["--pp", "2", *alone]
    more = ["--weight-cache", str(cache)]
    cached = [*flags, *more]
    measure_load(folder, quantization, None)
    loads: dict[str, list[tuple[float, float]]] = {"off": [], "empty": [], "filled": []}
    for _ in range(rounds):
        loads["off"].append(measure_load(folder, quantization, None))
        rmtree(cache, ignore_errors=True)
        for name in ("empty", "filled"):
            loads[name].append(measure_load(folder, quantization, cache))
    starts: dict[str, list[float]] = {"off": [], "filled": []}
    ready(folder, cached)
    for _ in range(rounds):
        starts["off"].append(ready(folder, flags))
        starts["filled"].append(ready(folder, cached))
    texts = set()
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(run_server(folder, each))[1]
            for name, each in (("off", flags), ("filled", cached))
        }
        times: dict[str, list[float]] = {name: [] for name in urls}
        for _ in range(3 * rounds):
            for name, url in urls.items():
                text, seconds = complete(url, NUM_TOKENS)
                texts.add(text)
                times[name].append(seconds)
    if len(texts) != 1:
        raise RuntimeError("the text with the cache differs from that without")
    speeds = {name: NUM_TOKENS / median(each) for name, each in times.items()}
    return {
        "format": quantization,
        "load": {name: median(wall for wall, _ in each) for name, each in loads.items()},
        "load_cpu": {name: median(cpu for _, cpu in each) for name, each in loads.items()},
        "start": {name: median(each) for name, each in starts.items()},
        "tokens_per_second": speeds,
        "files_bytes": sum(path.stat().st_size for path in cache.iterdir()),
        "memory": {
            "off": measure_memory(folder, alone),
            "filled": measure_memory(folder, [*alone, *more]),
        },
    }


def format_page(results: dict[str, Any]) -> str:
    """Format the figures in words and tables."""
    times = [
        [
            row["format"],
            *(
                f"{row['load'][name]:.2f} ({row['load_cpu'][name]:.2f})"
                for name in ("off", "empty", "filled")
            ),
            *(f"{row['start'][name]:.2f}" for name in ("off", "filled")),
            *(f"{row['tokens_per_second'][name]:.1f}" for name in ("off", "filled")),
        ]
        for row in results["formats"]
    ]
    header = [
        "--quantization",
        "load, s (CPU s): off",
        "writing",
        "mapped",
        "ready, s: off",
        "mapped",
    ]
    memory = [
        [row["format"], name, part, *_format_steps(row["memory"][name][part])]
        for row in results["formats"]
        for name in ("off", "filled")
        for part in ("workers", "all")
    ]
    return "\n\n".join(
        [
            f"{results['origin']} Rounds: {results['rounds']}, medians; others used "
            f"{results['foreign_cores']:.2f} cores.",
            format_table([*header, "tokens/s: off", "mapped"], times),
            "PSS that each engine of one stage adds, with its KV cache of 32 MiB. The worker of a "
            f"further one should add {AIM_BYTES / 1e6:.0f} MB at most beyond it:",
            format_table(
                ["--quantization", "cache", "processes", "first, MB", "second, MB", "third, MB"],
                memory,
            ),
        ]
    )


def _format_steps(sizes: Sequence[int]) -> list[str]:
    """Return what each engine adds to a sum, in MB."""
    return [f"{(after - before) / 1e6:.0f}" for before, after in pairwise([0, *sizes])]


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "weight-cache", 5, "")
    parser.add_argument(
        "--cache", type=Path, help="a new folder for the cache, such as one in /dev/shm"
    )
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    values: argparse.Namespace = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        if values.model:
            folder = resolve_model(values.model)
        else:
            # In a process of its own, whose memory is free afterwards.
            subprocess.run([sys.executable, "-m", "benchmarks.cpu.model", str(folder)], check=True)
        foreign = ForeignCpu()
        rows = []
        for name in values.formats:
            cache = Path(temporary, "cache") if values.cache is None else values.cache / "cache"
            rows.append(measure_format(folder, name, values.rounds, cache))
            print(rows[-1], file=sys.stderr, flush=True)
            rmtree(cache)
        results = {
            "origin": origin("benchmarks.weight_cache"),
            "rounds": values.rounds,
            "foreign_cores": foreign.cores(),
            "formats": rows,
        }
    write_results(values.output, "Packed weights in files", format_page(results), results)


if __name__ == "__main__":
    main()
