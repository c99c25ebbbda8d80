"""A fleet of two engines, each with an HTTP server of its own."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.network.ports import free_port
from tests.support.servers.fleet import Router, serving_fleet
from tests.support.servers.nodes import EXACT
from tests.support.servers.server import DEADLINE, wait_until

KEY = "a-key-of-the-fleet"
PROMPT = " ".join(f"{number} owls and {number + 1} foxes." for number in range(20))
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 12}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 12}
BODIES = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}


class Pair:
    """The fleet, and the HTTP ports of its engines."""

    def __init__(self, router: Router, ports: dict[str, int]) -> None:
        self.router = router
        self.ports = ports

    def post(self, name: str, path: str, **body: object) -> Any:
        """The answer of an engine to a router that shows the control key."""
        url = f"http://127.0.0.1:{self.ports[name]}{path}"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return json.load(answer)

    def metric(self, name: str, metric: str) -> float:
        """The value of a metric of an engine."""
        url = f"http://127.0.0.1:{self.ports[name]}/metrics"
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = (line for line in lines if line.startswith(f"gllm:{metric}"))
        return float(line.rpartition(" ")[2])

    def computed(self, name: str) -> float:
        """Prompt tokens that an engine has computed."""
        return self.metric(name, "prefill_tokens_total")

    def generated(self, name: str) -> int:
        """Decodes that an engine has computed."""
        return int(self.metric(name, "decode_tokens_total"))

    def shown_tokens(self, name: str) -> int:
        """Decodes that the router knows of."""
        tokens: int = self.router.rows()[name]["stats"]["decode_tokens"]
        return tokens

    def held_blocks(self, name: str) -> int:
        """KV blocks that an engine keeps for others."""
        held: int = self.router.rows()[name]["stats"]["held_blocks"]
        return held

    def has_cache(self, name: str) -> bool:
        """True once an engine gives KV blocks to others."""
        path, body = "/v1/completions", {**BODIES["/v1/completions"], "max_tokens": 1}
        answer = self.post(name, path, **body, kv_transfer_params={"do_remote_decode": True})
        return answer["kv_transfer_params"] is not None


@contextmanager
def serving_pair(folder: Path) -> Iterator[Pair]:
    """Start a router and the engines p and d; the key file is written to the folder."""
    key_file = folder / "control"
    key_file.write_text(KEY)
    ports = {"p": free_port(), "d": free_port()}
    flags = [*EXACT, "--kv-transfer", "--kv-fetch", "always"]
    with serving_fleet("demo", names=(), router_flags=["--preset", "distserve"]) as router:
        for name, role in (("p", "prefill"), ("d", "decode")):
            of_http = ["--control-key-file", str(key_file), "--control-network", "127.0.0.0/8"]
            of_http += ["--port", str(ports[name]), "--role", role, "--preset", "distserve"]
            router.start_engine(name, *flags, *of_http)
        router.wait_until_ready("p", "d")
        started = Pair(router, ports)
        wait_until(lambda: started.has_cache("p") and started.has_cache("d"))
        yield started
