"""`gllm chat` and the console script, as a person at a terminal meets them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.server import DEADLINE, serving

pytestmark = pytest.mark.full


def gllm(*arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the console script with something typed into it."""
    command = [sys.executable, "-c", "import sys; from gllm.__main__ import main; sys.exit(main())"]
    return subprocess.run(
        [*command, *arguments], input=typed, capture_output=True, text=True, timeout=DEADLINE
    )


def test_a_conversation(tiny_model: Path) -> None:
    with serving(tiny_model, "--api-key", "sesame", "--threads", "2") as server:
        locked = gllm("chat", "--url", server.url, typed="Hello\n")
        options = ["--url", server.url, "--api-key", "sesame", "--max-tokens", "9"]
        options += ["--temperature", "0"]
        run = gllm("chat", *options, typed="Hello\n/clear\n/help\nAgain\n/quit\nnever said\n")
        refused = gllm("chat", *options, typed="Hello " * 9000 + "\n/quit\n")
    assert (locked.returncode, "API key" in locked.stderr) == (1, True)
    assert run.returncode == 0, run.stderr
    assert tiny_model.name in run.stdout
    assert run.stdout.count("tokens/s]") == 2
    assert refused.returncode == 0
    assert "error: " in refused.stderr
    assert "tokens" in refused.stderr


def test_no_server() -> None:
    run = gllm("chat", "--url", "http://127.0.0.1:9")
    assert run.returncode == 1
    assert "http://127.0.0.1:9" in run.stderr
    assert "Traceback" not in run.stderr


def test_commands() -> None:
    assert "serve" in gllm("--help").stdout
    assert gllm("--version").stdout.strip() == "0.1.0"
    unknown = gllm("nothing")
    assert (unknown.returncode, "no command 'nothing'" in unknown.stderr) == (2, True)
    assert "--pipeline-parallel-size" in gllm("serve", "--help").stdout
