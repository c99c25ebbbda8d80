"""Check that gllm works where it is installed as a package: `python -m scripts.check_installation`.

Builds an sdist, and from the sdist two wheels: one as usual and one without a C++ compiler. Each
wheel is installed into a new virtual environment outside the checkout, serves the demo model there
and answers a chat question. The commands that a user has after `pip install` run there too.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
READY_SECONDS = 120.0
COMMAND_SECONDS = 600.0
NO_KERNELS_MESSAGE = "compiled kernels: none"
"""Part of the log line of a server that found no compiled kernels."""


class Environment:
    """A virtual environment outside the checkout.

    Args:
        folder: An empty folder; commands run in it and the virtual environment is made below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)

    def install(self, *arguments: str) -> None:
        """Run `pip install`."""
        self.run("python", "-m", "pip", "install", "--quiet", *arguments)

    def run(self, program: str, *arguments: str, stdin: str = "", **variables: str) -> str:
        """Run a program of the environment; return its output.

        Raises:
            subprocess.CalledProcessError: The program failed; its output has been printed.
        """
        result = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self.folder,
            env=clean_variables() | variables,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        if result.returncode:
            print(result.stdout, file=sys.stderr)
            result.check_returncode()
        return result.stdout

    @contextmanager
    def serve(self, *command: str) -> Iterator[tuple[str, Path]]:
        """Run a server from the start to the end of the block; yield its URL and its log file.

        Raises:
            RuntimeError: The server did not become ready.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log_path = self.folder / "server.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [str(self._bin / command[0]), *command[1:], "--port", str(port)],
                cwd=self.folder,
                env=clean_variables(),
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process)
            yield url, log_path
        except Exception:
            print(log_path.read_text(), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(timeout=COMMAND_SECONDS)


def clean_variables() -> dict[str, str]:
    """Return this process's environment without what could point back to the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "GLLM_CPU_KERNELS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until /ready answers 200. Raises RuntimeError if the process exits or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS:.0f} s")


def ask(url: str) -> str:
    """Return the server's answer to one chat question.

    Raises:
        RuntimeError: The answer is empty.
    """
    question = {"role": "user", "content": "Tell me a story about Otto the fox."}
    body = json.dumps({"messages": [question], "max_tokens": 24, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=COMMAND_SECONDS) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    if not text.strip():
        raise RuntimeError("the server's answer is empty")
    return text


def build(folder: Path, *, has_compiler: bool, source: Path | None = None) -> tuple[Path, Path]:
    """Build a wheel from an sdist; return both paths.

    Args:
        folder: Where the files go.
        has_compiler: False to build as on a machine without a C++ compiler.
        source: An sdist that exists; None to build one from the checkout.
    """
    if source is None:
        python("-m", "build", "--sdist", "--outdir", str(folder), str(ROOT))
        source = next(folder.glob("*.tar.gz"))
    compiler = {} if has_compiler else {"CC": "/bin/false", "CXX": "/bin/false"}
    wheels = folder / ("compiled" if has_compiler else "portable")
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(source), **compiler)
    return source, next(wheels.glob("*.whl"))


def python(*arguments: str, **variables: str) -> None:
    """Run this interpreter outside the checkout. Raises subprocess.CalledProcessError."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=tempfile.gettempdir(),
        env=clean_variables() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        result.check_returncode()


def check_commands(environment: Environment) -> None:
    """Serve with `gllm serve`, and run the other commands against that server."""
    with environment.serve("gllm", "serve", "demo") as (url, log_path):
        print(f"gllm serve demo: {ask(url)!r}")
        if NO_KERNELS_MESSAGE in log_path.read_text():
            raise RuntimeError("the wheel that was built with a compiler has no kernels")
        chat = environment.run("gllm", "chat", "--url", url, "--max-tokens", "8", stdin="Hello\n")
        print(f"gllm chat: {chat.splitlines()[-2]!r}")
        load = ("--num-prompts", "4", "--workload", "fixed:16,8")
        environment.run("gllm", "bench", "serve", "--base-url", url, *load)
        print("gllm bench serve: done")
    environment.run("gllm", "simulate", "--requests", "20")
    print("gllm simulate: done")


def check_module(environment: Environment, *, has_kernels: bool) -> None:
    """Serve with `python -m gllm.serve`, with or without compiled kernels.

    Raises:
        RuntimeError: The log does not say what the wheel contains.
    """
    with environment.serve("python", "-m", "gllm.serve", "demo") as (url, log_path):
        print(f"python -m gllm.serve demo: {ask(url)!r}")
        lines = [line for line in log_path.read_text().splitlines() if NO_KERNELS_MESSAGE in line]
        if len(lines) != (0 if has_kernels else 1):
            raise RuntimeError(f"{len(lines)} log lines say {NO_KERNELS_MESSAGE!r}")


def main() -> None:
    """Run all checks. Exits with an error where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unpinned", action="store_true", help="install the newest dependencies")
    constraints = [] if parser.parse_args().unpinned else ["-c", str(ROOT / "requirements.txt")]
    with tempfile.TemporaryDirectory(prefix="gllm-installation-") as name:
        folder = Path(name)
        sdist, wheel = build(folder, has_compiler=True)
        _, portable_wheel = build(folder, has_compiler=False, source=sdist)
        environment = Environment(folder)
        environment.install(TORCH)
        environment.install(*constraints, str(wheel))
        check_commands(environment)
        check_module(environment, has_kernels=True)
        environment.install("--force-reinstall", "--no-deps", str(portable_wheel))
        check_module(environment, has_kernels=False)


if __name__ == "__main__":
    main()
