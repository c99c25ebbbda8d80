"""One engine prefills, and one on another machine decodes: the KV blocks travel over TLS."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.net.rig import NamespaceRig, unsupported_reason
from gllm.runtime.messaging.security import create_secret_file
from tests.support.servers.nodes import EXACT, NodeServer
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]
HTTP_PORTS = {"router": 8000, "P": 8001, "D": 8001}
BODY = {"prompt": "The owl said " * 20, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
THETA = 300
PROMPTS = {"transfer": [300 + number for number in range(THETA - 20)], "push": [*range(300, 1100)]}
"""By the time at which their KV, 3 KiB per token, travels: after the prefill, or during it."""
SLOW_LINK = 4e6
"""Bits per second, at which the KV takes 1.7 s and 5 s."""
SLOW_STEPS = ("--debug-step-seconds", "0.1", "--prefill-batch-tokens", "64")
"""The longer prompt takes 1.3 s."""
PUSHES = ("--kv-push", "layer", "--kv-push-threshold", str(THETA))


class Machines:
    """A router and the prefill engine P on one machine, the decode engine D on another one."""

    def __init__(self, rig: NamespaceRig, servers: dict[str, NodeServer]) -> None:
        self.rig = rig
        self.servers = servers

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of /engines by name."""
        try:
            rows = self.servers["router"].get("/engines")["engines"]
        except (OSError, json.JSONDecodeError):
            return {}
        return {row["name"]: row for row in rows}

    def stats(self, name: str) -> dict[str, Any]:
        """Statistics of an engine, as the router knows them."""
        stats: dict[str, Any] = self.rows()[name]["stats"]
        return stats

    def wait_until_ready(self) -> None:
        """Wait until both engines take hand-offs."""

        def are_ready() -> bool:
            rows = self.rows()
            return rows.keys() == {"P", "D"} and all(
                row["has_kv_transfer"] and row["state"] == "ready" for row in rows.values()
            )

        wait_until(are_ready)

    def wait_until_empty(self) -> None:
        """Wait until no engine has blocks in use, or for another one."""

        def is_empty() -> bool:
            names = "running", "waiting", "fetching", "held_blocks", "kv_usage"
            return not any(self.stats(each)[name] for each in ("P", "D") for name in names)

        wait_until(is_empty)

    def complete(self, name: str, body: dict[str, Any]) -> Any:
        """Return the choices of a completion by the router or an engine."""
        status, answer = self.servers[name].post(COMPLETIONS, body)
        assert status == 200, answer
        return answer["choices"]


@contextmanager
def running_machines(
    folder: Path, preset: str, *flags: str, shaped: tuple[int, ...] = ()
) -> Iterator[Machines]:
    """Start the machines; logs and the secret are written to the folder."""
    secret = folder / "secret"
    create_secret_file(secret)
    with NamespaceRig(2, shaped=shaped) as rig, ExitStack() as stack:
        servers: dict[str, NodeServer] = {}

        def start(name: str, machine: int, *command: str) -> None:
            port = HTTP_PORTS[name]
            common = ["--port", str(port), "--node-secret-file", str(secret), "--preset", preset]
            log = folder / f"{name}.log"
            server = servers[name] = NodeServer(rig, machine, [*command, *common], port, log)
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)

        hub, data = rig.reach(0, 29700), rig.reach(0, 29710)
        start("router", 0, "gllm.commands.router", "demo", "--hub", hub)
        common = ["demo", *EXACT, "--router", hub, "--kv-transfer", "--kv-fetch", "always", *flags]
        prefill = ["--role", "prefill", "--name", "P", "--kv-transfer-address", data]
        start("P", 0, "gllm.serve", *common, *prefill)
        start("D", 1, "gllm.serve", *common, "--role", "decode", "--name", "D")
        machines = Machines(rig, servers)
        machines.wait_until_ready()
        yield machines


def test_blocks_travel_between_machines(tmp_path: Path) -> None:
    with running_machines(tmp_path, "distserve") as machines:
        status, answer = machines.servers["router"].post(COMPLETIONS, BODY)
        assert status == 200, answer
        decode = machines.stats("D")
        assert decode["fetched_tokens"] == answer["usage"]["prompt_tokens"]
        assert decode["failed_fetches"] == 0
        assert answer["choices"] == machines.complete("P", BODY)


def complete_across_cut(
    machines: Machines, body: dict[str, Any], moment: str, is_short: bool
) -> Any:
    """Cut the link of D while it fetches; return the choices of the request."""
    hop = machines.rig.hop(1)
    hop.set_rate(SLOW_LINK)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(machines.complete, "router", body)
        wait_until(lambda: machines.stats("D")["fetching"])
        assert bool(machines.stats("P")["held_blocks"]) == (moment == "transfer")
        hop.cut()
        if is_short:
            time.sleep(1)
        else:
            wait_until(lambda: machines.rows().keys() == {"P"})
            load.result()
        hop.set_rate(0)
        hop.restore()
        return load.result()


def test_a_cut_link_changes_no_text(tmp_path: Path) -> None:
    """S9: a cut of one second, and one until the router has lost D, so that P goes on."""
    flags = *SLOW_STEPS, *PUSHES
    with running_machines(tmp_path, "tetri", *flags, shaped=(1,)) as machines:
        for (moment, prompt), is_short in product(PROMPTS.items(), (True, False)):
            body = {**BODY, "prompt": prompt}
            expected = machines.complete("P", body)
            assert machines.servers["router"].post("/reset_prefix_cache", {})[0] == 200
            before = machines.stats("D")
            answer = complete_across_cut(machines, body, moment, is_short)
            assert answer == expected, (moment, is_short)
            machines.wait_until_ready()
            machines.wait_until_empty()
            if is_short:
                after = machines.stats("D")
                assert after["fetched_tokens"] - before["fetched_tokens"] == len(prompt)
                assert after["prefill_tokens"] == before["prefill_tokens"]
