"""The process of an actor in Ray."""

import sys

import msgspec
import pytest

from gllm.deploy.ray.plan_processes import ProcessActor, ProcessStatus, ProcessTask
from tests.deploy.ray.test_agents import cluster
from tests.plan.test_processes import LOCAL
from tests.support.servers.server import wait_until


def status_of(actor: ProcessActor) -> ProcessStatus:
    return msgspec.json.decode(actor.status(), type=ProcessStatus)


def test_an_actor_that_drains_its_process_stays_to_report_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", cluster(3))
    task = ProcessTask(LOCAL, "a", next(iter(LOCAL.nodes)), "127.0.0.1")
    actor = ProcessActor(msgspec.json.encode(task), None)
    actor.drain()
    wait_until(lambda: status_of(actor).has_ended)
    status = status_of(actor)
    assert (status.is_ready, status.is_invalid) == (False, False)
    assert status.cause == "it was killed by SIGTERM"
