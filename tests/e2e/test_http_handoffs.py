"""Two engines that a router of another project directs, and roles that change under load."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gllm.fleet.report_pacer import LOAD_REPORT_SECONDS
from gllm.kernels.native.builds import BUILD_VARIABLE, select_build
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from tests.e2e.fleet import Router, free_port, serving_fleet
from tests.e2e.recovery_load import REQUESTS, Load
from tests.e2e.server import DEADLINE, wait_until
from tests.e2e.test_router import EXACT, compare

pytestmark = pytest.mark.long
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    key_file = tmp_path_factory.mktemp("keys") / "control"
    key_file.write_text(KEY)
    ports = {"p": free_port(), "d": free_port()}
    flags = [*EXACT, "--kv-transfer", "--kv-fetch", "always"]
    with pytest.MonkeyPatch.context() as patch:
        # One build of the kernels for both engines; the choices that each one measures may differ.
        patch.setenv(BUILD_VARIABLE, select_build().name)
        with serving_fleet("demo", names=(), router_flags=["--preset", "distserve"]) as router:
            for name, role in (("p", "prefill"), ("d", "decode")):
                of_http = ["--control-key-file", str(key_file), "--control-network", "127.0.0.0/8"]
                of_http += ["--port", str(ports[name]), "--role", role, "--preset", "distserve"]
                router.start_engine(name, *flags, *of_http)
            router.wait_until_ready("p", "d")
            started = Pair(router, ports)
            wait_until(lambda: started.has_cache("p") and started.has_cache("d"))
            yield started


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_decode_engine_computes_no_prompt(pair: Pair, path: str, dialect: str) -> None:
    """Its text is that of one engine, and of the prompt it computes the last token alone."""
    expected = pair.post("p", path, **BODIES[path])
    body: dict[str, Any] = {**BODIES[path], "cache_salt": f"{dialect} {path}"}
    before, held = pair.computed("d"), pair.held_blocks("p")
    if dialect == "vllm":
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = pair.post("p", path, **{**body, "max_tokens": 1}, kv_transfer_params=asked)
        answer = pair.post("d", path, **body, kv_transfer_params=first["kv_transfer_params"])
    else:
        first, answer = send_to_both(pair, path, {**body, "bootstrap_room": 2**62 + len(path)})
    assert first["usage"]["completion_tokens"] == 1
    assert text_of(answer) == text_of(expected)
    assert pair.computed("d") == before + 1
    # Long before the lease ends, they are free where they were computed.
    time.sleep(3 * LOAD_REPORT_SECONDS)  # the router knows of them by then
    wait_until(lambda: pair.held_blocks("p") <= held, seconds=HOLD_LEASE_SECONDS / 2)
    # Blocks of a foreign hand-off never get into the prefix cache.
    again = pair.post("d", path, **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text_of(again) == text_of(expected)


def send_to_both(pair: Pair, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answers of both engines to a request of a router of SGLang."""
    body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": pair.ports["p"]}
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(pair.post("p", path, **body)))
    thread.start()
    answer = pair.post("d", path, **body)
    thread.join()
    return first[0], answer


def has_roles(router: Router, roles: dict[str, str]) -> bool:
    return {name: row["role"] for name, row in router.rows().items()} == roles


def test_roles_are_changed_at_the_engines_too(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """T7: by commands of the engines, under load; and how long a change takes."""
    router = pair.router
    expected = Load(router, "roles stay").wait()
    load = Load(router, "roles change")
    load.wait_for_events(2 * len(REQUESTS))
    busy = [router.change_role("p", "decode"), router.change_role("d", "prefill")]
    for name, role in (("p", "prefill"), ("d", "decode")):
        assert pair.post(name, "/pd_role_switch", new_role=role)["success"]
    wait_until(partial(has_roles, router, {"p": "prefill", "d": "decode"}))
    assert load.is_running
    compare(load.wait(), expected)
    idle = [router.change_role("p", role) for role in ("decode", "prefill") * 5]
    with capsys.disabled():
        print(
            f" [a flip takes {1000 * min(busy):.0f} to {1000 * max(busy):.0f} ms under load, "
            f"{1000 * min(idle):.1f} to {1000 * max(idle):.1f} ms without] ",
            end="",
        )


def test_a_routers_view_of_a_decode_engine_is_fresh(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """T8: the load is that of others, so the router learns of it by the engine's reports alone.

    The age of a view is the time since the engine has left the number of tokens that it shows.
    """
    body = {**BODIES["/v1/completions"], "max_tokens": 400}
    thread = threading.Thread(target=pair.post, args=("d", "/v1/completions"), kwargs=body)
    counts: list[tuple[float, int]] = []
    ages: list[float] = []
    start = pair.shown_tokens("d")
    thread.start()
    while thread.is_alive():
        counts.append((time.monotonic(), pair.generated("d")))
        seen = pair.shown_tokens("d")
        now = time.monotonic()
        left = [at for at, count in counts if count > seen]
        if seen > start and counts[-1][1] > counts[0][1]:
            ages.append(now - left[0] if left else 0.0)
    assert len(ages) > 10
    ages.sort()
    assert ages[len(ages) // 2] < 3 * LOAD_REPORT_SECONDS
    with capsys.disabled():
        print(f" [age of {len(ages)} views: median {ages[len(ages) // 2]:.3f} s, ", end="")
        print(f"greatest {ages[-1]:.3f} s] ", end="")
