"""Compare two commits, or the same one with further flags, under load in alternating rounds.

    python -m benchmarks.commits OLD NEW [--model demo] [--streams 16] [--rounds 15]
    python -m benchmarks.commits . . --new-flag=--kv-cache-disk=FOLDER:1GiB

Each commit is checked out into a temporary worktree, its kernels are compiled there, and its server
is started afresh every few rounds. In each round both servers get the same requests, in alternating
order, from the client of this checkout. The result is the median of the ratios NEW / OLD of output
tokens per second and of CPU time per output token, with 95 % confidence intervals. CPU time is that
of the server's processes, and that of the whole machine, where what the kernel does in the
background counts too, such as writing to a disk.

With the demo model, whose arithmetic is small, the ratio is that of the host overhead.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import NamedTuple

from benchmarks.confidence import median_interval
from benchmarks.cpu.watch import busy_seconds, cpu_seconds, tree

ROOT = Path(__file__).parents[1]
START_SECONDS = 180.0
"""Time that a server has to become ready."""


class RunningServer(NamedTuple):
    """Server that is ready."""

    url: str
    pid: int


class Round(NamedTuple):
    """Figures of one server in one round."""

    tokens_per_second: float
    """Output tokens."""
    cpu_seconds: float
    """CPU time of the server's processes per output token."""
    busy_seconds: float
    """CPU time of all processes of the machine, the client included, per output token."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check out a commit into a temporary worktree and compile its kernels.

    The folder of a checkout with compiled kernels is yielded as it is.
    """
    if Path(commit, "gllm").is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gllm"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", path, commit], cwd=ROOT, check=True
        )
        try:
            subprocess.run(
                [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                cwd=path,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], cwd=ROOT, check=True)


@contextmanager
def serving(checkout_path: Path, model: str, flags: list[str]) -> Iterator[RunningServer]:
    """Start the server of a checkout and yield it once it is ready.

    Raises:
        RuntimeError: The server exits or is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gllm.serve", model, "--port", str(port), *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout_path)}
    process = subprocess.Popen(
        command, cwd=checkout_path, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/ready")
        yield RunningServer(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Poll a server until it is ready.

    Raises:
        RuntimeError: The server exits or is not ready in time.
    """
    deadline = monotonic() + START_SECONDS
    while monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            sleep(0.2)
    raise RuntimeError(f"no server is ready at {url}; exit status: {process.poll()}")


def measure_round(server: RunningServer, options: argparse.Namespace, seed: int) -> Round:
    """Send the load of one round to a server and return its figures."""
    num_requests = options.streams * options.waves
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "gllm", "bench", "serve", "--base-url", server.url]
        command += ["--workload", f"fixed:{options.prompt},{options.output}"]
        command += ["--num-prompts", str(num_requests), "--max-concurrency", str(options.streams)]
        command += ["--seed", str(seed), "--no-progress", "--save-result", result.name]
        own, busy = cpu_seconds(tree(server.pid)), busy_seconds()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        own, busy = cpu_seconds(tree(server.pid)) - own, busy_seconds() - busy
        figures = json.loads(Path(result.name).read_text())
    if figures["completed"] != num_requests:
        raise RuntimeError(f"{figures['failed']} requests failed")
    num_tokens = num_requests * options.output
    return Round(float(figures["output_throughput"]), own / num_tokens, busy / num_tokens)


def measure(paths: list[Path], options: argparse.Namespace) -> list[tuple[Round, Round]]:
    """Return the figures of (OLD, NEW) for each round."""
    rounds: list[tuple[Round, Round]] = []
    flags = [options.flags, [*options.flags, *options.new_flag]]
    while len(rounds) < options.rounds:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(serving(path, options.model, each))
                for path, each in zip(paths, flags, strict=True)
            ]
            for server in servers:
                measure_round(server, options, seed=0)  # warm-up
            for _ in range(min(options.restart_every, options.rounds - len(rounds))):
                order = (0, 1) if len(rounds) % 2 else (1, 0)
                seed = len(rounds) + 1
                figures = {i: measure_round(servers[i], options, seed) for i in order}
                rounds.append((figures[0], figures[1]))
                old, new = figures[0], figures[1]
                print(
                    f"round {len(rounds)}: {old.tokens_per_second:.0f} and "
                    f"{new.tokens_per_second:.0f} tokens/s",
                    flush=True,
                )
    return rounds


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", help="commit, or folder of a built checkout, to compare with")
    parser.add_argument("new", help="commit, or folder of a built checkout, to measure")
    parser.add_argument("--model", default="demo", help="a Hugging Face folder or demo")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests")
    parser.add_argument("--waves", type=int, default=4, help="requests per stream in a round")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="output tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--restart-every", type=int, default=5, help="rounds between restarts of the servers"
    )
    parser.add_argument(
        "--new-flag", action="append", default=[], help="further flag of the server of NEW"
    )
    parser.add_argument("flags", nargs="*", help="flags of both servers, after --")
    return parser


def main() -> None:
    """Measure two commits and print the ratios of their figures."""
    options = make_parser().parse_args()
    with checkout(options.old) as old, checkout(options.new) as new:
        rounds = measure([old, new], options)
    for name, scale, values in zip(
        ("tokens/s", "CPU of the server, us per token", "CPU of the machine, us per token"),
        (1, 1e6, 1e6),
        zip(*(zip(*pair, strict=True) for pair in rounds), strict=True),
        strict=True,
    ):
        print(format_ratio(name, scale, list(values)))


def format_ratio(name: str, scale: float, pairs: list[tuple[float, float]]) -> str:
    """Return the medians and the median ratio of a figure in words.

    Args:
        name: of the figure, with its unit.
        scale: factor of the unit.
        pairs: figure of OLD and NEW in each round.
    """
    ratios = [new / old for old, new in pairs]
    low, high = median_interval(ratios)
    old, new = (scale * median(values) for values in zip(*pairs, strict=True))
    return (
        f"{name}, medians of {len(pairs)} rounds: {old:.1f} and {new:.1f}; ratio "
        f"{median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
