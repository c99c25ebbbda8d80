"""A router over two engines loses nothing, whoever dies or leaves."""

import json
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers import conventions
from tests.support.servers.fleet import Router, serving_fleet
from tests.support.servers.recovery_load import (
    COMPLETIONS,
    REQUESTS,
    Answer,
    Load,
    RepeatedLoad,
    compare,
)
from tests.support.servers.server import wait_until

EXACT = ["--dtype", "float32", "--threads", "1"]
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
# An engine on a busy machine is not lost because it is slow.
ROUTER = ["--policy", "round-robin", "--engine-timeout", "10", "--ejection-seconds", "0.1"]
# A returned engine has its share of the next load at once.
ROUTER += ["--slow-start-seconds", "0"]
BODY = {"prompt": "The owl said", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
def router(expected: dict[str, Answer]) -> Iterator[Router]:
    """A router with two engines, to which a second router may be added."""
    with serving_fleet("demo", names=(), router_flags=ROUTER) as started:
        for name in ("a", "b"):
            start_engine(started, name)
        started.wait_until_ready("a", "b")
        yield started


def start_engine(router: Router, name: str) -> None:
    """Start an engine that dials the router and the second one, whether or not that runs."""
    both = f"127.0.0.1:{router.hub},127.0.0.1:{router.second_hub}"
    router.start_engine(name, *EXACT, routers=both)


def num_lost_engines(router: Router) -> int:
    """Number of engines that were lost so far."""
    with router.open("/engines", None) as answer:
        lost: dict[str, int] = json.load(answer)["router"]["lost_engines"]
        return lost.get("lost", 0)


def test_requests_are_divided(router: Router, expected: dict[str, Answer]) -> None:
    """Their texts are those of one engine."""
    compare(Load(router, "undisturbed").wait(), expected)
    rows = router.rows()
    assert sorted(rows) == ["a", "b"]
    assert all(row["num_dispatched"] >= len(REQUESTS) // 2 for row in rows.values())
    assert all(row["num_requests"] == 0 for row in rows.values())


@pytest.mark.full
def test_routers_of_other_projects_can_use_it(router: Router) -> None:
    conventions.check_rendered_requests(router)
    conventions.check_loads(router)
    conventions.check_sleep(router)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.full),
    ],
)
def test_an_engine_is_lost_under_load(
    router: Router, expected: dict[str, Answer], number: signal.Signals
) -> None:
    """Requests of all kinds continue on the other engine with the same text."""
    router.wait_until_ready("a", "b")
    num_lost = num_lost_engines(router)
    # On a busy machine one load could end before the signal.
    load = RepeatedLoad(router, f"lost {number.name}")
    load.wait_for_events(3 * len(REQUESTS))
    wait_until(lambda: router.rows()["a"]["num_requests"] > 0)
    router.engines["a"].kill(number)
    wait_until(lambda: num_lost_engines(router) == num_lost + 1)
    assert "a" not in router.rows()
    for answer in load.stop():
        compare({answer.kind: answer}, expected)
    if number == signal.SIGSTOP:
        # What it had computed before comes late, to nobody.
        router.engines["a"].kill(signal.SIGCONT)
    else:
        router.engines["a"].close()
        start_engine(router, "a")
    router.wait_until_ready("a", "b")


def test_drain_with_migration(router: Router, expected: dict[str, Answer]) -> None:
    router.wait_until_ready("a", "b")
    load = Load(router, "drain")
    load.wait_for_events(2 * len(REQUESTS))
    status, answer = router.post("/engines/b/drain?migrate=true", {})
    assert (status, answer["num_requests"]) == (200, 0)
    wait_until(lambda: router.rows()["b"]["state"] == "draining")
    compare(load.wait(), expected)
    num_before = router.rows()["b"]["num_dispatched"]
    assert [router.post(COMPLETIONS, BODY)[0] for _ in range(4)] == [200] * 4
    assert router.rows()["b"]["num_dispatched"] == num_before
    assert router.post("/engines/b/undrain", {})[0] == 200
    router.wait_until_ready("a", "b")
    assert router.post("/engines/c/drain", {})[0] == 404


class Stream:
    """Short requests one after the other, until `stop`."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._should_stop = threading.Event()
        self.answers: list[tuple[int, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[int, Any]]:
        """Return status and body of all answers."""
        self._should_stop.set()
        self._thread.join()
        return self.answers

    def _run(self) -> None:
        while not self._should_stop.is_set():
            self.answers.append(self._router.post(COMPLETIONS, BODY))


@pytest.mark.full
def test_a_rolling_restart_has_no_error(router: Router, expected: dict[str, Answer]) -> None:
    streams = [Stream(router) for _ in range(2)]
    for name in ("a", "b"):
        load = Load(router, f"restart {name}")
        load.wait_for_events(len(REQUESTS))
        code, errors = router.engines[name].terminate()
        assert code == 0, errors
        compare(load.wait(), expected)
        start_engine(router, name)
        router.wait_until_ready("a", "b")
    answers = [answer for stream in streams for answer in stream.stop()]
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


@pytest.mark.full
def test_without_engines_requests_are_refused_in_the_end() -> None:
    router = Router("demo", "--park-timeout", "1")
    try:
        wait_until(lambda: router.status("/version") == 200)
        assert router.status("/ready") == 503
        assert router.status("/health") == 200
        with pytest.raises(urllib.error.HTTPError) as failure:
            router.open(COMPLETIONS, json.dumps(BODY).encode())
        failure.value.close()
        assert failure.value.code == 503
        assert int(failure.value.headers["Retry-After"]) >= 1
    finally:
        router.close()


def test_the_end_of_a_router_ends_its_requests_alone(router: Router) -> None:
    """The engines serve two routers; one of them is killed."""
    second = Router("demo", hub=router.second_hub)
    try:
        wait_until(lambda: second.status("/ready") == 200)
        router.wait_until_ready("a", "b")
        expected = router.post(COMPLETIONS, BODY)[1]["choices"]
        assert second.post(COMPLETIONS, BODY)[1]["choices"] == expected

        def num_running() -> int:
            return sum(row["stats"]["running"] for row in router.rows().values())

        wait_until(lambda: num_running() == 0)
        events = second.stream(COMPLETIONS, {**BODY, "max_tokens": 1000})
        next(events)
        wait_until(lambda: num_running() == 1)
        os.kill(second.pid, signal.SIGKILL)
        assert not any(event["choices"][0]["finish_reason"] for event in events)
        wait_until(lambda: num_running() == 0)
        assert router.post(COMPLETIONS, BODY)[0] == 200
    finally:
        second.close()
