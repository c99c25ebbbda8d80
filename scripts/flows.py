"""Count the functions that a flow enters: `python -m scripts.flows FLOW [--tree TREE]`.

FLOW is `chat`, `death` or `handoff`. Starts real servers of the demo model with a profile hook in
each process (`sys.setprofile`), lets one flow run, and prints how many functions of gllm, in how
many files, each process has entered meanwhile. Lambdas, comprehensions and generator expressions
are left out. What a process does at all times, such as a heartbeat, counts if it falls into the
flow.
"""

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.network.ports import free_port

HOOK = """
import atexit, json, mmap, os, sys, threading, time
folder = os.environ["GLLM_FLOWS"]
with open(folder + "/flag", "rb") as file:
    flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
entered = set()

def profile(frame, event, argument):
    if event == "call" and flag[0]:
        entered.add(frame.f_code)

def report():
    codes = [c for c in list(entered) if c.co_name[:1] != "<" and "/gllm/" in c.co_filename]
    with open("/proc/self/cmdline", "rb") as file:
        title = file.read().replace(b"\\0", b" ").decode().strip()
    functions = [[c.co_filename, c.co_qualname] for c in codes]
    path = f"{folder}/{os.getpid()}"
    with open(path, "w") as file:
        json.dump([title, functions], file)
    os.rename(path, path + ".json")

def watch():
    while not flag[0]:
        time.sleep(0.02)
    while flag[0]:
        time.sleep(0.02)
    report()

if "gllm" in " ".join(sys.orig_argv):
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
"""
"""A sitecustomize module: Python imports it when it starts."""
PROMPT = {"messages": [{"role": "user", "content": "Tell me about an owl."}], "max_tokens": 16}


class Recorder:
    """Servers with the hook, and what their processes have entered."""

    def __init__(self, tree: Path, stack: ExitStack) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (self._folder / "sitecustomize.py").write_text(HOOK)
        (self._folder / "flag").write_bytes(b"\0")
        with (self._folder / "flag").open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        paths = f"{self._folder}:{tree}"
        self._environment = {**os.environ, "PYTHONPATH": paths, "GLLM_FLOWS": str(self._folder)}
        self._tree = tree
        self._stack = stack

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a command of gllm; it ends with the stack."""
        process = subprocess.Popen(
            [sys.executable, "-m", "gllm", *arguments, "--log-level", "warning"],
            env=self._environment,
            cwd=self._tree,
            start_new_session=True,
        )
        self._stack.callback(os.killpg, process.pid, signal.SIGKILL)
        return process

    def record(self, flow: Callable[[], object]) -> dict[str, list[list[str]]]:
        """Let a flow run; return by process which functions it entered, as file and name."""
        self._flag[0] = 1
        flow()
        self._flag[0] = 0
        time.sleep(1.0)
        found = [json.loads(path.read_text()) for path in self._folder.glob("*.json")]
        return {
            f"{title[:40]} {index}": functions for index, (title, functions) in enumerate(found)
        }


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Return the whole answer of a server on this machine."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        body_read: bytes = answer.read()
    return body_read


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition that may ask a server that does not answer yet holds."""
    for _ in range(1200):
        try:
            if condition():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.1)
    raise TimeoutError("the servers were not ready after two minutes")


def chat(recorder: Recorder) -> dict[str, list[list[str]]]:
    """Record a streamed chat completion of an engine of one stage that has served one before."""
    port = free_port()
    recorder.start("serve", "demo", "--port", str(port))
    wait_until(lambda: ask(port, "/health"))
    body = {"model": "demo", "stream": True, **PROMPT}
    ask(port, "/v1/chat/completions", body)
    return recorder.record(lambda: ask(port, "/v1/chat/completions", body))


def death(recorder: Recorder) -> dict[str, list[list[str]]]:
    """Record the death of the second of two stages under a request, until the request has ended."""
    port = free_port()
    process = recorder.start("serve", "demo", "--port", str(port), "--pp", "2")
    wait_until(lambda: ask(port, "/health"))
    body = {"model": "demo", **PROMPT, "max_tokens": 1500, "ignore_eos": True}
    ask(port, "/v1/chat/completions", {**body, "max_tokens": 4})

    def flow() -> None:
        command = ["pgrep", "-P", str(process.pid), "-f", "gllm-stage-1"]
        (stage,) = subprocess.check_output(command, text=True).split()
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(port), json.dumps(body)]):
            time.sleep(0.3)
            os.kill(int(stage), signal.SIGKILL)

    return recorder.record(flow)


CLIENT = """
import sys, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, sys.argv[2].encode(),
    {"Content-Type": "application/json"}), timeout=240).read()
"""
"""A request in a process of its own."""


def handoff(recorder: Recorder) -> dict[str, list[list[str]]]:
    """Record a completion that a router lets one engine prefill and another one decode."""
    port, hub = free_port(), free_port()
    recorder.start(
        "router", "demo", "--port", str(port), "--hub", str(hub), "--preset", "distserve"
    )
    for name in ("prefill", "decode"):
        recorder.start(
            *("serve", "demo", "--port", "0", "--name", name, "--router", f"127.0.0.1:{hub}"),
            *("--role", name, "--kv-transfer", "auto", "--kv-fetch", "always"),
        )

    def is_ready() -> bool:
        rows = json.loads(ask(port, "/engines"))["engines"]
        return sum(row["state"] == "ready" and row["has_kv_transfer"] for row in rows) == 2

    wait_until(is_ready)
    body = {
        "model": "demo",
        "prompt": "The owl said that " * 20,
        "max_tokens": 16,
        "ignore_eos": True,
    }
    ask(port, "/v1/completions", body)
    time.sleep(1.0)
    body["prompt"] = "A fox met the owl " * 20

    def flow() -> None:
        ask(port, "/v1/completions", body)
        # The ticket of the blocks is given back after the answer.
        time.sleep(1.0)

    return recorder.record(flow)


FLOWS = {"chat": chat, "death": death, "handoff": handoff}


def main() -> None:
    """Record a flow and print what each process has entered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("flow", choices=FLOWS)
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="checkout to run")
    values = parser.parse_args()
    with ExitStack() as stack:
        entered = FLOWS[values.flow](Recorder(values.tree.resolve(), stack))
    everything = {tuple(function) for functions in entered.values() for function in functions}
    print("| process | functions | files |\n| --- | --: | --: |")
    for title, functions in entered.items():
        print(f"| {title} | {len(functions)} | {len({file for file, _ in functions})} |")
    print(f"| all | {len(everything)} | {len({file for file, _ in everything})} |")


if __name__ == "__main__":
    main()
