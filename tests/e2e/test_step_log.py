"""The step log of a real engine: complete, in order, enough to replay."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.messages.reports import BubbleReport
from gllm.observability.step_log import RestartEvent, read_step_log
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.replay import replay_calls
from tests.support.servers.server import DEADLINE, stages


async def serve(config: EngineConfig, count: int) -> BubbleReport:
    """Serve requests; what the pipeline says it lost."""
    async with Engine(config) as engine:

        async def one(index: int) -> None:
            params = SamplingParams(
                temperature=0,
                max_tokens=6 + index,
                ignore_eos=True,
                logprobs=1,
                prompt_logprobs=index if index % 2 else None,
                repetition_penalty=1.0 + index / 10,
            )
            async for delta in engine.generate([5 + index] * (20 + index), params):
                assert not delta.error

        await asyncio.gather(*(one(index) for index in range(count)))
        return await read_last_bubbles(engine)


async def read_last_bubbles(engine: Engine) -> BubbleReport:
    """Return the report in which all stages of an idle engine have reported their last times."""
    # They do so twice per second, and once after the last step.
    last, since = engine.status().bubbles, time.monotonic()
    async with asyncio.timeout(DEADLINE):
        while time.monotonic() < since + 1.5:
            await asyncio.sleep(0.05)
            if (bubbles := engine.status().bubbles) != last:
                last, since = bubbles, time.monotonic()
    return last


@pytest.mark.parametrize(
    ("stages", "ranks", "policy"),
    [
        pytest.param(1, (1,), "auto", marks=pytest.mark.full),
        (2, (2, 1), "balance"),
        pytest.param(4, (1,), "throttle", marks=pytest.mark.full),
        *(
            pytest.param(4, (1,), policy, marks=pytest.mark.long)
            for policy in ("vllm", "orca+", "lightllm", "fastertransformer")
        ),
    ],
)
async def test_everything_is_written(
    tiny_model: Path, tmp_path: Path, stages: int, ranks: tuple[int, ...], policy: str
) -> None:
    log = tmp_path / "steps.jsonl"
    config = EngineConfig.from_options(
        str(tiny_model),
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        policy=policy,
        step_log=str(log),
        threads=1,
    )
    bubbles = await serve(config, 5)
    events = list(read_step_log(log))
    run = build_run_record(events)
    assert run.start.scheduler.stages == stages
    assert run.start.degrees == ([2, 1] if stages == 2 else [])
    assert [served.num_prompt_tokens for served in run.requests.values()] == [20, 21, 22, 23, 24]
    assert [served.line.num_tokens for served in run.requests.values()] == [6, 7, 8, 9, 10]
    before = [0.0] * stages
    for step in run.micro_batches:
        reached = step.planned_time
        assert step.committed_time is not None
        for stage, times in enumerate(step.stage_times):
            assert times is not None
            assert max(reached, before[stage]) <= times.start <= times.end
            before[stage] = times.end
            # A stage may note its end after the next one, which it has handed over to, began.
            reached = times.start
        assert before[-1] <= step.committed_time
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans > 0
    uses = build_run_record(events, warm_ups=True).stage_usages()
    close = pytest.approx([use.bubble for use in uses], abs=0.01 * bubbles.work_seconds)
    assert bubbles.seconds == close


@pytest.mark.full
async def test_the_log_goes_on_after_recoveries(tiny_model: Path, tmp_path: Path) -> None:
    """The driver dies, then the last stage."""
    log = tmp_path / "steps.jsonl"
    config = EngineConfig.from_options(
        str(tiny_model), pipeline_parallel_size=2, step_log=str(log), threads=1
    )
    num_tokens = [0] * 4

    async def generate(engine: Engine, index: int) -> None:
        params = SamplingParams(temperature=1, seed=index, max_tokens=400, ignore_eos=True)
        async for delta in engine.generate([5 + index] * (20 + index), params):
            assert not delta.error
            num_tokens[index] += len(delta.token_ids)

    async def kill() -> None:
        for victim in (0, 1):
            # The warm-up and the requests have to be in the file, which is written now and then.
            async with asyncio.timeout(DEADLINE):
                while log.read_text().count('"event":"add"') < 5 * (victim + 1):
                    await asyncio.sleep(0.005)
            os.kill(stages(os.getpid())[victim], signal.SIGKILL)

    async with Engine(config) as engine:
        await asyncio.gather(kill(), *(generate(engine, index) for index in range(4)))
        status = engine.status()
    assert num_tokens == [400] * 4
    assert status.recoveries == {"killed": 2}
    events = list(read_step_log(log))
    restarts = [event for event in events if isinstance(event, RestartEvent)]
    assert [(each.epoch, each.num_resumed_requests) for each in restarts] == [(2, 4), (3, 4)]
    assert [f"stage {victim}" in each.cause for victim, each in enumerate(restarts)] == [True, True]
    calls = replay_calls(events)
    assert calls.num_equal == calls.num_plans > 300
    run = build_run_record(events)
    assert [served.line.num_tokens for served in run.requests.values()] == [400] * 4
    assert [served.num_resumptions for served in run.requests.values()] == [2] * 4


async def test_a_file_that_cannot_be_written_is_named(tiny_model: Path) -> None:
    config = EngineConfig.from_options(str(tiny_model), step_log="/nowhere/steps.jsonl")
    with pytest.raises(ValueError, match=r"step_log /nowhere/steps\.jsonl"):
        await serve(config, 1)


@pytest.mark.full
async def test_an_engine_whose_step_log_finds_no_space_serves(tiny_model: Path) -> None:
    config = EngineConfig.from_options(
        str(tiny_model), step_log="/dev/full", kv_cache_memory=2**24, threads=1
    )
    async with Engine(config) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        deltas = [delta async for delta in engine.generate([5], params)]
        # The log is flushed twice per second.
        await asyncio.sleep(0.7)
        deltas += [delta async for delta in engine.generate([6], params)]
        assert not any(delta.error for delta in deltas)
        assert engine.status().epoch == 1
