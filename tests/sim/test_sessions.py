"""Conversations: what their turns share, and that schedulers and clients see it."""

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from gllm.commands.bench.load import PlannedRequest, jobs_of, plan_load, warmup_requests
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import make_workload, scale_request
from gllm.sim.workloads.sessions import DEFAULTS, SessionTurn, parse_sessions, sample_turns
from tests.support.sim.requests import to_scheduler_requests

WORKLOAD = "sessions:8,5,3,64,20,10"


def by_session(count: int = 400) -> dict[int, list[SessionTurn]]:
    turns = defaultdict(list)
    for turn in sample_turns(WORKLOAD, count, 0):
        turns[turn.session].append(turn)
    return turns


def test_each_turn_continues_the_one_before() -> None:
    for turns in by_session().values():
        assert [len(turn.parts) for turn in turns] == [2 + 2 * i for i in range(len(turns))]
        for earlier, later in pairwise(turns):
            assert later.parts[: len(earlier.parts)] == earlier.parts
            assert later.parts[-2].num_tokens == earlier.num_output_tokens


def test_sessions_have_their_turns_and_are_replaced() -> None:
    sessions = by_session()
    assert max(map(len, sessions.values())) == 5
    # All but those that are open at the end have had all their turns.
    assert sum(len(turns) < 5 for turns in sessions.values()) <= 8
    order = [turn.session for turn in sample_turns(WORKLOAD, 400, 0)]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, session in enumerate(order):
        first.setdefault(session, index)
        last[session] = index
    open_at = Counter(i for s in first for i in range(first[s], last[s] + 1))
    assert max(open_at.values()) <= 8
    assert open_at[200] >= 4


def test_system_prompts_are_shared_and_all_else_is_not() -> None:
    sessions = by_session()
    prompts = {turns[0].parts[0] for turns in sessions.values()}
    assert [part.num_tokens for part in prompts] == [64] * 3
    own = [part.key for turns in sessions.values() for part in turns[-1].parts[1:]]
    assert len(set(own)) == len(own)
    assert not set(own) & {part.key for part in prompts}


def test_lengths_are_around_their_means() -> None:
    turns = sample_turns(WORKLOAD, 4000, 1)
    users = [turn.parts[-1].num_tokens for turn in turns]
    outputs = [turn.num_output_tokens for turn in turns]
    assert (min(users), max(users)) == (10, 30)
    assert fmean(users) == pytest.approx(20, rel=0.03)
    assert fmean(outputs) == pytest.approx(10, rel=0.03)
    assert sample_turns(WORKLOAD, 50, 2) == sample_turns(WORKLOAD, 50, 2)
    assert sample_turns(WORKLOAD, 50, 2) != sample_turns(WORKLOAD, 50, 3)


@pytest.mark.parametrize("text", ["1,2,3", "0,1,1,1,1,1", "1,1,1,1,1,x", "1,1,1,1,1,1.5", ""])
def test_bad_parameters_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"sessions takes SESSIONS,TURNS,.* as in sessions:32,"):
        make_workload(f"sessions:{text}", 5)
    assert parse_sessions("sessions") == DEFAULTS


def test_longest_default_conversation_fits_the_demo() -> None:
    _, turns, _, system, user, output = DEFAULTS
    assert system + turns * (user * 3 // 2 + output * 3 // 2) <= 1024


def test_scheduler_finds_the_history_in_its_prefix_cache() -> None:
    resolved = SchedulerConfig(block_size=4).resolve(1, 20_000, 1000)
    pipeline = SimulatedPipeline(resolved, ConstantCostModel(0.001))
    jobs = make_workload(WORKLOAD, 100, 1.0, "poisson")
    assert len({job.session for job in jobs}) > 8
    pipeline.submit_each(to_scheduler_requests(jobs))
    pipeline.loop.run()
    stats = pipeline.scheduler.stats()
    # All of a prompt but the last message, the last answer and what they fill of a block.
    new = sum(sum(part.num_tokens for part in job.parts[-2:]) + 4 for job in jobs)
    assert stats.prefix_queries == sum(job.num_prompt_tokens for job in jobs)
    assert stats.prefix_queries - stats.prefix_hits <= new + 8 * 64
    assert stats.prefix_hits > 0.6 * stats.prefix_queries


def test_scaled_conversations_keep_what_they_share() -> None:
    jobs = [scale_request(job, 0.5) for job in make_workload(WORKLOAD, 60)]
    for job in jobs:
        assert job.num_prompt_tokens == sum(part.num_tokens for part in job.parts)
        assert job.parts[0].num_tokens == 32
    with pytest.raises(ValueError, match=r"conversation of .* tokens, but at most 100"):
        [scale_request(job, 1.0, 100) for job in make_workload(WORKLOAD, 60)]


def plan(**flags: Any) -> list[PlannedRequest]:
    return plan_load(ServeConfig(load=LoadConfig(WORKLOAD, 60), request_rate=5.0, **flags), 99)


def test_bench_sends_histories_as_ids_or_words() -> None:
    for flags in ({}, {"prompt_kind": "text"}, {"endpoint": "/v1/chat/completions"}):
        planned = plan(**flags)
        assert plan(**flags) == planned
        last: dict[str, Any] = {}
        for each in planned:
            prompt = each.prompt.split() if isinstance(each.prompt, str) else each.prompt
            assert len(prompt) == each.prompt_tokens
            if each.session in last:
                assert prompt[: len(last[each.session])] == last[each.session]
            last[each.session] = prompt
        heads = {tuple(prompt[:64]) for prompt in last.values()}
        assert len(heads) == 3


def test_bench_warms_up_with_other_prompts_of_no_session() -> None:
    config = ServeConfig(load=LoadConfig(WORKLOAD, 60), num_warmups=3)
    load = plan_load(config, 99)
    warm = warmup_requests(config, load, 99)
    assert [each.session for each in warm] == ["", "", ""]
    assert not {tuple(each.prompt) for each in warm} & {tuple(each.prompt) for each in load}
    with pytest.raises(ValueError, match="only `gllm bench serve`"):
        jobs_of(config.load)
