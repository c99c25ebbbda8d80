"""Agents that return after pauses, with each order of eviction."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.configured import build_simulation, run_simulation
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate, simulate_sessions
from gllm.sim.metrics.session_turns import TurnResult, summarize_turns
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.agents import DEFAULTS, parse_agents, parse_pauses, sample_agent_turns
from gllm.sim.workloads.requests import WorkloadRequest, longest_job, make_agents, make_workload

AGENTS = "agents:12,8,32,200,150,16"


def make_deployment(
    jobs: list[WorkloadRequest], num_blocks: int, eviction: str = "lru"
) -> Deployment:
    config = SchedulerConfig(prefix_cache_eviction=eviction)
    scheduler = config.resolve(1, num_blocks, longest_job(jobs))
    return Deployment("test", [1], ConstantCostModel(0.01), scheduler)


def run(jobs: list[WorkloadRequest], num_blocks: int, order: str) -> dict[str, Any]:
    deployment = make_deployment(jobs, num_blocks, "lru" if order == "hindsight" else order)
    result = simulate_sessions(deployment, jobs, has_hindsight=order == "hindsight")
    assert len(result.record.requests) == len(jobs)
    assert all(
        len(result.record.requests[index].line.times) == job.num_output_tokens
        for index, job in enumerate(jobs)
    )
    return summarize_turns(result.turns)


def test_a_turn_begins_its_pause_after_the_turn_before() -> None:
    jobs = make_agents(AGENTS, 2.0, pauses="uniform:1,20")
    record = simulate(make_deployment(jobs, 5000), jobs)
    for (index, job), (later_index, later) in pairwise(enumerate(jobs)):
        if later.pause_seconds is None:
            continue
        assert later.session == job.session
        end = record.requests[index].line.times[-1]
        arrival = record.requests[later_index].line.arrival
        assert arrival == pytest.approx(end + later.pause_seconds, abs=1e-6)


def test_with_room_for_all_a_later_turn_computes_what_is_new_alone() -> None:
    jobs = make_agents(AGENTS, 2.0, pauses="fixed:5")
    figures = run(jobs, 5000, "lru")
    assert figures["later_turns"] == 12 * 7
    # The last token of an answer is never computed, nor is a block that it does not fill kept.
    assert figures["recomputed_tokens"] <= 16 * figures["later_turns"]


@pytest.mark.parametrize("pauses", ["fixed:30", "uniform:20,40"])
def test_learned_times_recompute_less_than_lru_and_more_than_hindsight(pauses: str) -> None:
    jobs = make_agents("agents:24,12,32,200,150,16", 1.0, pauses=pauses)
    last = {job.session: job.num_prompt_tokens for job in jobs}
    num_blocks = sum(last.values()) // 16 // 3
    recomputed = {
        order: run(jobs, num_blocks, order)["recomputed_tokens"]
        for order in ("lru", "return", "hindsight")
    }
    assert recomputed["hindsight"] <= recomputed["return"] <= 0.95 * recomputed["lru"], recomputed


def test_a_pause_of_30_s_does_not_lose_50000_tokens_because_others_came() -> None:
    """An agent with a long context, whose pauses are known, beside requests that never return."""
    agent = make_agents("agents:1,8,16,50000,100,16", 1.0, pauses="fixed:30")
    others = make_workload("fixed:4000,8", 400, 1.5)
    jobs = sorted([*agent, *others], key=lambda job: job.arrival_seconds)
    num_blocks = 90_000 // 16
    shares = {order: run(jobs, num_blocks, order)["hit_share"] for order in ("lru", "return")}
    assert shares["lru"] < 0.5
    # The first two pauses are those from which the third one is known.
    assert shares["return"] > 0.7, shares


def test_hindsight_keeps_what_returns_sooner_and_lru_what_was_used_later() -> None:
    """Of two conversations, the cache has to give up one for a single request."""
    (part, *_), *_ = (job.parts for job in make_agents("agents:1,1,640,16,16,1", 1.0))

    def turn(key: int, session: str, time: float, pause: float | None = None) -> WorkloadRequest:
        parts = (part._replace(key=key),)
        return WorkloadRequest(time, 640, 2, parts, session, pause_seconds=pause)

    jobs = [
        *(turn(1, "soon", 0.0), turn(1, "soon", 0.0, 10.0)),
        *(turn(2, "late", 1.0), turn(2, "late", 1.0, 100.0)),
        turn(3, "", 2.0),
    ]
    cached = {}
    for has_hindsight in (True, False):
        run = simulate_sessions(make_deployment(jobs, 84), jobs, has_hindsight=has_hindsight)
        cached[has_hindsight] = [turn.num_cached_tokens for turn in run.turns]
    assert cached[True] == [0, 624, 0, 48]
    assert cached[False][1] < 64


def test_agents_are_those_of_the_same_lengths_whatever_their_pauses() -> None:
    fixed = sample_agent_turns(AGENTS, "fixed:1", 3)
    other = sample_agent_turns(AGENTS, "exponential:9|fixed:2/uniform:1,2", 3)
    for one, two in zip(fixed, other, strict=True):
        assert [turn.parts for turn in one] == [turn.parts for turn in two]
        for earlier, later in pairwise(one):
            assert later.parts[: len(earlier.parts)] == earlier.parts
            assert later.parts[-2].num_tokens == earlier.num_output_tokens
    assert {turn.pause_seconds for turn in fixed[0][1:]} == {1.0}
    assert all(1 <= turn.pause_seconds <= 2 for turn in other[1][1:])
    assert parse_agents("agents") == DEFAULTS


@pytest.mark.parametrize("text", ["1,2,3", "0,1,1,1,1,1", "1,1,1,1,1,x", ""])
def test_bad_agents_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"agents takes AGENTS,TURNS,.* as in agents:40,"):
        make_agents(f"agents:{text}", 1.0)


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:-1", "fixed:nan", "uniform:2,1", "lognormal:0,1", "fixed:1|x:2"]
)
def test_bad_pauses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="choose fixed:S"):
        parse_pauses(text)


def configure(**fields: Any) -> SimulationConfig:
    small = {"workload": "agents:4,3,16,64,32,8", "model": "qwen2.5-7b"}
    return SimulationConfig(**small | fields)


def test_the_command_reports_sessions_and_refuses_what_has_none() -> None:
    config = configure(pauses="fixed:2", scheduler=SchedulerConfig(prefix_cache_eviction="return"))
    result = run_simulation(config, *build_simulation(config))
    assert result.summary["sessions"]["later_turns"] == 8
    hindsight = replace(config, hindsight=True)
    run_simulation(hindsight, *build_simulation(hindsight))
    for fields in ({"engines": 2}, {"engines": 2, "hindsight": True}):
        bad = configure(**fields)
        with pytest.raises(ValueError, match="leave --engines out"):
            run_simulation(bad, *build_simulation(bad))


def test_recomputed_tokens_are_those_of_the_turn_before_that_were_not_cached() -> None:
    turns = [
        TurnResult("a", 100, 10, 0, 0.5),
        TurnResult("b", 50, 10, 48, 0.1),
        TurnResult("a", 130, 10, 96, 0.2),
        TurnResult("a", 150, 10, 160, 0.3),
    ]
    figures = summarize_turns(turns)
    assert (figures["reusable_tokens"], figures["recomputed_tokens"]) == (110 + 140, 14)
    assert figures["hit_share"] == pytest.approx(1 - 14 / 250)
    assert figures["later_ttft"]["p50"] == pytest.approx(0.25)
    assert summarize_turns([])["hit_share"] is None
