"""Codex and Claude Code, as npm has them, complete a scripted task of ten turns on our server.

The server is real, its engine plays the answers. The tests need the programs `codex` and `claude`
on PATH, or in the folder that $GLLM_AGENTS names:

    npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code
    GLLM_AGENTS=FOLDER/node_modules/.bin python -m pytest -m long tests/e2e/test_coding_agents.py
"""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gllm.config.sampling import SamplingParams
from gllm.config.server import ServerConfig
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.errors import Handler
from gllm.text.tokenizer import Tokenizer
from tests.support.http.client_probes import write_call
from tests.support.http.fake_engine import FakeEngine, FakeRequest
from tests.support.http.scripted_server import DEMO

pytestmark = pytest.mark.long
SECONDS = 240
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
BROKEN_CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": %s}}\n</tool_call>'
DONE = "The task is done."


def find_agent(name: str) -> str:
    """Return the path of an agent's program; skip the test if there is none."""
    found = shutil.which(name, path=os.environ.get("GLLM_AGENTS")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: see the module's docstring")
    return found


@dataclass
class ScriptedTurns(FakeEngine):
    """Answers requests with more tokens than a limit by a script, and others with a word."""

    script_texts: list[str] = field(default_factory=list)
    max_model_len: int = 10**6

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, **more: Any
    ) -> list[FakeRequest]:
        """Select the next answer if the request is a turn of the task: it offers tools."""
        text = self.tokenizer.decode(prompts[0], False)
        is_turn = "exec_command" in text or '"Bash"' in text
        self.reply = self.script_texts.pop(0) if is_turn and self.script_texts else DONE
        return await super().submit(prompts, params, **more)


@dataclass
class AgentServer:
    """A server for one agent, and the statuses and warnings of its answers."""

    url: str
    engine: ScriptedTurns
    statuses: list[int]
    warnings: list[str]


@pytest.fixture
async def server() -> AsyncIterator[AgentServer]:
    engine = ScriptedTurns(Tokenizer.load(DEMO))
    config = ServerConfig()
    app = make_app(engine, config)
    statuses: list[int] = []
    warnings: list[str] = []

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        # Claude Code 2.1.332 probes the host by HEAD /api/hello, and takes 404 for an answer.
        if request.method != "HEAD":
            statuses.append(response.status)
        warnings.append(response.headers.get("Warning", ""))
        return response

    app.middlewares.insert(0, record)
    runner = ConnectionRunner(app, config)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield AgentServer(f"http://127.0.0.1:{port}", engine, statuses, warnings)
    await runner.cleanup()


async def run_agent(command: list[str], folder: Path, **variables: str) -> str:
    """Run an agent to its end in a folder; return its output."""
    home = folder / "home"
    home.mkdir()
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**inherited, "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text
    return text


async def test_codex_completes_a_task_of_ten_turns(server, tmp_path):
    program = find_agent("codex")
    (tmp_path / "dot.png").write_bytes(PIXEL)
    server.engine.script_texts = [
        write_call("exec_command", cmd="echo one > a.txt"),
        write_call("view_image", path=str(tmp_path / "dot.png")),
        write_call("multi_agent_v1__close_agent", target="nobody"),
        BROKEN_CALL % ("exec_command", r'"\ud800"'),
        BROKEN_CALL % ("exec_command", "1,"),
        write_call("get_goal"),
        write_call("write_stdin", session_id=99, chars="x"),
        write_call("no_such_tool", x=1),
        write_call("exec_command", cmd="cat a.txt; echo two > b.txt"),
        DONE,
    ]
    provider = f'{{name = "g", base_url = "{server.url}/v1", wire_api = "responses"}}'
    settings = ("model=fake/model", "model_provider=g", f"model_providers.g={provider}")
    command = [program, "exec", "--skip-git-repo-check"]
    command.append("--dangerously-bypass-approvals-and-sandbox")
    command += [part for setting in settings for part in ("-c", setting)]
    output = await run_agent([*command, "Do the task"], tmp_path)
    assert DONE in output
    assert set(server.statuses) == {200}
    assert len(server.statuses) >= 10
    assert "web_search" in server.warnings[0]
    assert server.engine.script_texts == []
    assert (tmp_path / "b.txt").read_text() == "two\n"


async def test_claude_code_completes_a_task_of_ten_turns(server, tmp_path):
    program = find_agent("claude")
    (tmp_path / "dot.png").write_bytes(PIXEL)
    file = str(tmp_path / "c.txt")
    server.engine.script_texts = [
        write_call("Bash", command="echo one > a.txt", description="Write"),
        write_call("Write", file_path=file, content="hello\n"),
        write_call("Read", file_path=file),
        write_call("Edit", file_path=file, old_string="hello", new_string="bye"),
        write_call("Read", file_path=str(tmp_path / "dot.png")),
        write_call("WebSearch", query="pipeline parallelism"),
        BROKEN_CALL % ("Bash", r'"\ud800"'),
        BROKEN_CALL % ("Bash", "1,"),
        write_call("NoSuchTool", x=1),
        DONE,
    ]
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "fake/model",
        "ANTHROPIC_SMALL_FAST_MODEL": "fake/model",
        "IS_SANDBOX": "1",
    }
    command = [program, "-p", "--output-format", "json", "--dangerously-skip-permissions"]
    output = await run_agent([*command, "Do the task"], tmp_path, **variables)
    # Newer versions report the model in a line before the result.
    result = json.loads(next(line for line in output.splitlines()[::-1] if line[:1] == "{"))
    assert result["subtype"] == "success", output
    assert set(server.statuses) <= {200}
    assert any("web_search" in warning for warning in server.warnings)
    assert "[image: not shown" in server.engine.tokenizer.decode(server.engine.calls[-1].prompt)
    assert Path(file).read_text() == "bye\n"
