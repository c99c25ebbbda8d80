"""Compare the served throughput of two commits in alternating rounds.

    python -m benchmarks.commits OLD NEW [--model demo] [--streams 16] [--rounds 15]

Each commit is checked out into a temporary worktree, its kernels are compiled there, and its server
is started afresh every few rounds. In each round both servers get the same requests, in alternating
order, from the client of this checkout. The result is the median of the ratios NEW / OLD of output
tokens per second, with a 95 % confidence interval.

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

from benchmarks.confidence import median_interval

ROOT = Path(__file__).parents[1]
START_SECONDS = 180.0
"""Time that a server has to become ready."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check out a commit into a temporary worktree and compile its kernels."""
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
def serving(checkout_path: Path, model: str, flags: list[str]) -> Iterator[str]:
    """Start the server of a checkout and yield its URL once it is ready.

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
        yield f"http://127.0.0.1:{port}"
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


def output_tokens_per_second(url: str, options: argparse.Namespace, seed: int) -> float:
    """Send the load of one round to a server and return its output tokens per second."""
    num_requests = options.streams * options.waves
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "gllm", "bench", "serve", "--base-url", url]
        command += ["--workload", f"fixed:{options.prompt},{options.output}"]
        command += ["--num-prompts", str(num_requests), "--max-concurrency", str(options.streams)]
        command += ["--seed", str(seed), "--no-progress", "--save-result", result.name]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(Path(result.name).read_text())
    if figures["completed"] != num_requests:
        raise RuntimeError(f"{figures['failed']} requests failed")
    return float(figures["output_throughput"])


def measure(paths: list[Path], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return output tokens per second of (OLD, NEW) for each round."""
    rounds: list[tuple[float, float]] = []
    while len(rounds) < options.rounds:
        with ExitStack() as servers:
            urls = [
                servers.enter_context(serving(path, options.model, options.flags)) for path in paths
            ]
            for url in urls:
                output_tokens_per_second(url, options, seed=0)  # warm-up
            for _ in range(min(options.restart_every, options.rounds - len(rounds))):
                order = (0, 1) if len(rounds) % 2 else (1, 0)
                seed = len(rounds) + 1
                rates = {i: output_tokens_per_second(urls[i], options, seed) for i in order}
                rounds.append((rates[0], rates[1]))
                print(f"round {len(rounds)}: {rates[0]:.0f} and {rates[1]:.0f} tokens/s")
    return rounds


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", help="commit to compare with")
    parser.add_argument("new", help="commit to measure")
    parser.add_argument("--model", default="demo", help="a Hugging Face folder or demo")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests")
    parser.add_argument("--waves", type=int, default=4, help="requests per stream in a round")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="output tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--restart-every", type=int, default=5, help="rounds between restarts of the servers"
    )
    parser.add_argument("flags", nargs="*", help="flags of both servers, after --")
    return parser


def main() -> None:
    """Measure two commits and print the ratio of their throughput."""
    options = make_parser().parse_args()
    with checkout(options.old) as old, checkout(options.new) as new:
        rounds = measure([old, new], options)
    ratios = [new_rate / old_rate for old_rate, new_rate in rounds]
    low, high = median_interval(ratios)
    old_rate, new_rate = (median(rates) for rates in zip(*rounds, strict=True))
    print(
        f"output tokens/s, medians of {len(rounds)} rounds: {old_rate:.0f} and {new_rate:.0f}; "
        f"ratio {median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
