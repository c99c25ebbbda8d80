"""Event loop: order of events, lazy streams, garbage collection; runs of one seed are equal."""

import gc
from collections.abc import Iterator

import msgspec
import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.event_loop import CHECK_EVENTS, EventLoop
from gllm.sim.pipeline import SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import make_workload
from tests.support.full_cases import full_but
from tests.support.other_hashes import run_with_other_hashes
from tests.support.scheduler.pipeline import EVERY_POLICY
from tests.support.sim.requests import to_scheduler_requests


def test_events_of_one_time_go_by_rank_then_in_order() -> None:
    loop = EventLoop()
    said: list[str] = []

    def say(now: float, word: str) -> None:
        said.append(f"{word} {now:g}")
        if word == "second":
            loop.push(1.0, 0, say, "follows")

    loop.push(2.0, 0, say, "never")
    loop.push(1.0, 1, say, "second")
    loop.push(1.0, 1, say, "third")
    loop.push(1.0, 0, say, "first")
    assert loop.run(until=1.5) == 1.0
    assert said == ["first 1", "second 1", "follows 1", "third 1"]
    with pytest.raises(ValueError, match=r"at 0\.5 s is due before 1\.0 s: sort the events"):
        loop.push(0.5, 0, say, "before")


def test_rounding_errors_do_not_order_events() -> None:
    loop = EventLoop()
    said: list[str] = []
    loop.push(0.3, 1, lambda now, word: said.append(word), "second")
    loop.push(0.1 + 0.2, 0, lambda now, word: said.append(word), "first")
    loop.run()
    assert said == ["first", "second"]
    assert loop.now == 0.3 != 0.1 + 0.2


def test_a_stream_of_events_is_read_one_ahead() -> None:
    loop = EventLoop()
    num_read = 0
    happened: list[tuple[float, int]] = []

    def items() -> Iterator[tuple[float, int]]:
        nonlocal num_read
        for num_read in range(1, 101):
            yield num_read // 2 / 8, num_read

    def happen(now: float, item: int) -> None:
        assert num_read == item
        happened.append((now, item))

    loop.push_each(items(), 0, happen)
    loop.run()
    assert happened == [(item // 2 / 8, item) for item in range(1, 101)]
    loop.push_each([(60.0, 1), (59.0, 2)], 0, lambda now, item: None)
    with pytest.raises(ValueError, match="sort the events"):
        loop.run()


@pytest.mark.full
def test_garbage_collection_pauses_during_a_run_and_has_nothing_to_do() -> None:
    """Reference cycles do not grow with the number of requests, so a paused collector costs no
    memory."""
    resolved = SchedulerConfig(block_size=8).resolve(2, 60, 64)
    num_unreachable = []
    assert gc.isenabled()
    gc.disable()
    try:
        for num_requests in (10, 10, 80):
            gc.collect()
            pipeline = SimulatedPipeline(resolved, ConstantCostModel(0.05, 0.01))
            jobs = make_workload("uniform:4,40,2,24", num_requests, 6.0)
            pipeline.submit_each(to_scheduler_requests(jobs))
            pipeline.loop.run()
            num_unreachable.append(gc.collect())
    finally:
        gc.enable()
    assert num_unreachable[2] <= num_unreachable[1] + 10

    loop = EventLoop()
    states: list[bool] = []
    loop.push(0.0, 0, lambda now, argument: states.append(gc.isenabled()), None)
    loop.push(1.0, 0, lambda now, argument: loop.push(0.5, 0, print, None), None)
    with pytest.raises(ValueError, match="sort the events"):
        loop.run()
    assert states == [False]
    assert gc.isenabled()


def test_links_of_another_loop_are_refused() -> None:
    """Their events would never happen."""
    config, cost = SchedulerConfig().resolve(2, 10, 16), ConstantCostModel(1.0)
    links = make_pipeline_links(EventLoop(), 2)
    with pytest.raises(ValueError, match="links are in another event loop than the pipeline"):
        SimulatedPipeline(config, cost, links=links)


def encode_log(seed: int, policy: str = "balance", max_num_seqs: int = 256) -> bytes:
    """Return the step log of a run as bytes."""
    jobs = make_workload("uniform:4,40,2,24", 60, 6.0, seed=seed)
    config = SchedulerConfig(policy=policy, block_size=8, max_num_seqs=max_num_seqs)
    cost = ConstantCostModel(0.05, 0.01)
    deployment = Deployment("made up", [1, 1, 1], cost, config.resolve(3, 20, 64))
    _, events = simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))
    return b"\n".join(map(msgspec.json.encode, events))


@pytest.mark.parametrize(
    "policy",
    full_but(("throttle", "sarathi"), [name for name in EVERY_POLICY if name != "auto"]),
)
def test_a_seed_and_a_configuration_give_the_same_bytes(policy: str) -> None:
    log = encode_log(3, policy)
    assert log == encode_log(3, policy)
    assert log != encode_log(4, policy)
    assert log != encode_log(3, policy, max_num_seqs=2)


def test_another_process_with_other_hashes_gives_the_same_bytes() -> None:
    code = (
        "import sys; from tests.sim.test_event_loop import encode_log;"
        "sys.stdout.buffer.write(encode_log(3))"
    )
    assert run_with_other_hashes(code) == encode_log(3)


class CutOffError(Exception):
    pass


@pytest.mark.parametrize("is_child", [False, True])
def test_a_check_ends_a_running_loop(is_child: bool) -> None:
    num_checks = num_events = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:
            raise CutOffError

    loop = EventLoop(check=check)
    busy = loop.make_child() if is_child else loop

    def handle(now: float, argument: None) -> None:
        nonlocal num_events
        num_events += 1
        busy.push(now + 1, 0, handle, None)

    busy.push(0.0, 0, handle, None)
    with pytest.raises(CutOffError):
        loop.run()
    assert num_events == 3 * CHECK_EVENTS
    assert gc.isenabled()
