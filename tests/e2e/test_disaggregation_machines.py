"""One engine prefills, and one on another machine decodes: the KV blocks travel over TLS."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.net.rig import NamespaceRig, unsupported_reason
from gllm.kernels.native.builds import BUILD_VARIABLE, select_build
from gllm.runtime.security import create_secret_file
from tests.e2e.nodes import EXACT, NodeServer
from tests.e2e.recovery_load import COMPLETIONS
from tests.e2e.server import wait_until

HTTP_PORTS = {"router": 8000, "prefiller": 8001, "decoder": 8001}
BODY = {"prompt": "The owl said " * 20, "temperature": 0, "ignore_eos": True, "max_tokens": 8}


def rows(router: NodeServer) -> list[dict[str, Any]]:
    """Rows of /engines."""
    try:
        values: list[dict[str, Any]] = router.get("/engines")["engines"]
    except (OSError, json.JSONDecodeError):
        return []
    return values


@pytest.mark.long
@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_blocks_travel_between_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUILD_VARIABLE, select_build().name)
    secret = tmp_path / "secret"
    create_secret_file(secret)
    with NamespaceRig(2, shaped=()) as rig, ExitStack() as servers:

        def start(name: str, machine: int, *command: str) -> NodeServer:
            port = HTTP_PORTS[name]
            flags = ["--port", str(port), "--node-secret-file", str(secret)]
            log = tmp_path / f"{name}.log"
            server = NodeServer(rig, machine, [*command, *flags], port, log)
            servers.callback(server.process.wait)
            servers.callback(server.process.kill)
            return server

        hub, data = rig.reach(0, 29700), rig.reach(0, 29710)
        router = start("router", 0, "gllm.router", "demo", "--hub", hub, "--preset", "distserve")
        common = ["demo", *EXACT, "--router", hub, "--kv-transfer", "--kv-fetch", "always"]
        prefill = ["--role", "prefill", "--name", "P", "--kv-transfer-address", data]
        one = start("prefiller", 0, "gllm.serve", *common, *prefill)
        start("decoder", 1, "gllm.serve", *common, "--role", "decode", "--name", "D")
        wait_until(lambda: [row["has_kv_transfer"] for row in rows(router)] == [True, True])
        wait_until(lambda: all(row["state"] == "ready" for row in rows(router)))
        status, answer = router.post(COMPLETIONS, BODY)
        assert status == 200, answer
        decode = next(row["stats"] for row in rows(router) if row["name"] == "D")
        assert decode["fetched_tokens"] == answer["usage"]["prompt_tokens"]
        assert decode["failed_fetches"] == 0
        assert answer["choices"] == one.post(COMPLETIONS, BODY)[1]["choices"]
