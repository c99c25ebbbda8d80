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
from tests.support.servers.recovery_load import COMPLETIONS, REQUESTS, Answer, Load
from tests.support.servers.server import wait_until

EXACT = ["--dtype", "float32", "--threads", "1"]
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
# An engine on a busy machine is not lost because it is slow.
ROUTER = ["--policy", "round-robin", "--engine-timeout", "10", "--ejection-seconds", "0.1"]
# A returned engine has its share of the next load at once.
ROUTER += ["--slow-start-seconds", "0"]
BODY = {"prompt": "The owl said", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with serving_fleet("demo", *EXACT, router_flags=ROUTER) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(router: Router) -> dict[str, Answer]:
    """The answers of a run in which nothing fails."""
    answers = Load(router, "undisturbed").wait()
    assert all(not answer.errors for answer in answers.values())
    return answers


def num_lost_engines(router: Router) -> int:
    """Number of engines that were lost so far."""
    with router.open("/engines", None) as answer:
        lost: dict[str, int] = json.load(answer)["router"]["lost_engines"]
        return lost.get("lost", 0)


def compare(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Check that all answers are as expected."""
    for kind, answer in answers.items():
        assert answer.errors == [], kind
        assert answer.content == expected[kind].content, kind


def test_requests_are_divided(router: Router, undisturbed: dict[str, Answer]) -> None:
    rows = router.rows()
    assert sorted(rows) == ["a", "b"]
    assert all(row["num_dispatched"] >= len(REQUESTS) // 2 for row in rows.values())
    assert all(row["num_requests"] == 0 for row in rows.values())


def test_routers_of_other_projects_can_use_it(router: Router) -> None:
    conventions.check_rendered_requests(router)
    conventions.check_loads(router)
    conventions.check_sleep(router)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_is_lost_under_load(
    router: Router, undisturbed: dict[str, Answer], number: signal.Signals
) -> None:
    """Requests of all kinds continue on the other engine with the same text."""
    router.wait_until_ready("a", "b")
    num_lost = num_lost_engines(router)
    load = Load(router, f"lost {number.name}")
    load.wait_for_events(3 * len(REQUESTS))
    assert router.rows()["a"]["num_requests"] > 0
    router.engines["a"].kill(number)
    compare(load.wait(), undisturbed)
    assert num_lost_engines(router) == num_lost + 1
    assert "a" not in router.rows()
    if number == signal.SIGSTOP:
        # What it had computed before comes late, to nobody.
        router.engines["a"].kill(signal.SIGCONT)
    else:
        router.engines["a"].close()
        router.start_engine("a", *EXACT)
    router.wait_until_ready("a", "b")


def test_drain_with_migration(router: Router, undisturbed: dict[str, Answer]) -> None:
    router.wait_until_ready("a", "b")
    load = Load(router, "drain")
    load.wait_for_events(2 * len(REQUESTS))
    status, answer = router.post("/engines/b/drain?migrate=true", {})
    assert (status, answer["num_requests"]) == (200, 0)
    wait_until(lambda: router.rows()["b"]["state"] == "draining")
    compare(load.wait(), undisturbed)
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


def test_a_rolling_restart_has_no_error(router: Router, undisturbed: dict[str, Answer]) -> None:
    streams = [Stream(router) for _ in range(2)]
    for name in ("a", "b"):
        load = Load(router, f"restart {name}")
        load.wait_for_events(len(REQUESTS))
        code, errors = router.engines[name].terminate()
        assert code == 0, errors
        compare(load.wait(), undisturbed)
        router.start_engine(name, *EXACT)
        router.wait_until_ready("a", "b")
    answers = [answer for stream in streams for answer in stream.stop()]
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


def test_without_engines_requests_wait_and_a_second_router_takes_over(router: Router) -> None:
    """One engine serves two routers; the end of one router ends its requests only."""
    second = Router("demo", "--park-timeout", "1")
    try:
        wait_until(lambda: second.status("/version") == 200)
        assert second.status("/ready") == 503
        assert second.status("/health") == 200
        with pytest.raises(urllib.error.HTTPError) as failure:
            second.open(COMPLETIONS, json.dumps(BODY).encode())
        failure.value.close()
        assert failure.value.code == 503
        assert int(failure.value.headers["Retry-After"]) >= 1

        both = f"127.0.0.1:{router.hub},127.0.0.1:{second.hub}"
        router.start_engine("c", *EXACT, routers=both)
        router.wait_until_ready("a", "b", "c")
        wait_until(lambda: second.status("/ready") == 200)
        expected = router.post(COMPLETIONS, BODY)[1]["choices"]
        assert second.post(COMPLETIONS, BODY)[1]["choices"] == expected

        long = {**BODY, "max_tokens": 1000}
        events = second.stream(COMPLETIONS, long)
        next(events)
        wait_until(lambda: router.rows()["c"]["stats"]["running"] == 1)
        os.kill(second.pid, signal.SIGKILL)
        assert not any(event["choices"][0]["finish_reason"] for event in events)
        wait_until(lambda: router.rows()["c"]["stats"]["running"] == 0)
        assert router.post(COMPLETIONS, BODY)[0] == 200
    finally:
        second.close()
