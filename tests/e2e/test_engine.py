"""The asynchronous engine that programs embed, with real workers."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from examples import survive
from gllm.config.engine import EngineConfig
from gllm.config.kv_events import KvEventsConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.interface import EmbeddingError, EngineUnavailableError, OutputDelta
from gllm.options.field_types import FieldError
from gllm.runtime.head.kv_events import short_hash
from tests.e2e.conftest import POISON
from tests.support.engines.kv_driver import KvFollower
from tests.support.engines.kv_subscriber import Subscriber, request_replay
from tests.support.servers.recovery_load import HAS_EXACT_TEXTS
from tests.support.servers.server import stages

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={POISON: -100.0})


async def collect(
    engine: Engine, prompt: list[int], params: SamplingParams = GREEDY
) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, params)]


async def check_embeddings(engine: Engine, model: Path) -> None:
    """Embeddings are transformers' last hidden states; one that is no number is an error."""
    import torch
    import transformers

    reference = transformers.Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [[7], [7, 8, 9], list(range(5, 105))]
    embeddings = await asyncio.gather(*(engine.embed(prompt) for prompt in [*prompts, *prompts]))
    with pytest.raises(FieldError):
        await engine.embed([])
    with pytest.raises(EmbeddingError, match="finite"):
        await engine.embed([7, POISON])
    for prompt, vector in zip([*prompts, *prompts], embeddings, strict=True):
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([prompt])).last_hidden_state
        assert vector == pytest.approx(hidden[0, -1].tolist(), abs=1e-4)


async def check_errors(engine: Engine) -> None:
    """A request that cannot be computed ends alone."""
    alone = await collect(engine, [5, 6, 7])
    good, bad = await asyncio.gather(collect(engine, [5, 6, 7]), collect(engine, [5, POISON, 7]))
    assert token_ids(good) == token_ids(alone)
    assert bad[-1].finish_reason == "error"
    assert "not finite" in bad[-1].error
    assert token_ids(await collect(engine, [5, 6, 7])) == token_ids(alone)


def token_ids(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
async def test_the_asynchronous_engine(poisoned: Path, num_stages: int) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_batched_tokens": 48}
    config = EngineConfig.from_options(
        str(poisoned),
        pipeline_parallel_size=num_stages,
        kv_cache_memory=2**24,
        max_restarts=0,
        **options,
    )
    async with Engine(config) as engine:
        await abandon(engine)
        streams = [collect(engine, [5, i]) for i in range(20)]
        answers = await asyncio.gather(*streams)
        assert all(deltas[-1].finish_reason == "length" for deltas in answers)
        assert engine.status().num_requests == 0
        assert engine.status().is_healthy
        await check_embeddings(engine, poisoned)
        await check_errors(engine)
        waiting = asyncio.ensure_future(collect(engine, [5] * 300))
        await asyncio.sleep(0)
        kill_worker(num_stages - 1)
        last = (await waiting)[-1]
        assert (last.finish_reason, "SIGKILL" in last.error) == ("error", True)
        assert not engine.status().is_healthy
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await collect(engine, [5])


def kill_worker(stage: int, how: int = signal.SIGKILL) -> None:
    """Send a signal to this process's worker of a stage."""
    os.kill(stages(os.getpid())[stage], how)


async def check_kv_events(engine: Engine, replays: str) -> None:
    """A subscriber that reads all published events knows what the engine has cached now."""
    follower, context = KvFollower(), zmq.asyncio.Context()
    engine._supervisor.kv_events.subscribe(follower)
    subscriber = Subscriber(context, "", 16)
    for number, payload in await request_replay(replays, bytes(8)):
        subscriber.apply(number, payload)
    context.destroy(linger=0)
    assert subscriber.numbers == list(range(len(subscriber.numbers)))
    assert subscriber.num_cleared >= engine.status().epoch
    assert subscriber.blocks.keys() == {short_hash(digest) for digest in follower.digests} != set()
    assert {tokens[0] for _, tokens in subscriber.prefixes()} == {5}


async def wait_during(tasks: list[asyncio.Task[Any]], condition: Callable[[], bool]) -> None:
    """Wait for a condition that comes true while tasks run. Raises the error of a task."""
    while not condition():
        ended = [each for each in tasks if each.done()]
        await asyncio.gather(*ended)
        assert len(ended) < len(tasks), "the tasks ended before the condition came true"
        await asyncio.sleep(0.01)


@pytest.mark.full
async def test_requests_survive_deaths_and_a_worker_that_freezes(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A standby worker takes the first place; the next one may still import its modules."""
    long = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=300, ignore_eos=True)

    async def run(engine: Engine, number: int) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async for delta in engine.generate([5, number], long):
            assert delta.error == ""
            tokens[delta.index] += delta.token_ids
        return tokens

    config = EngineConfig.from_options(
        str(tiny_model),
        pipeline_parallel_size=2,
        kv_cache_memory=2**24,
        threads=1,
        standby_workers=1,
        freeze_timeout=3.0,
        recovery_timeout=300.0,
        kv_events_config=KvEventsConfig(
            True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replays"
        ),
    )
    faults = [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
    async with Engine(config) as engine:
        undisturbed = await asyncio.gather(*(run(engine, i) for i in range(4)))
        for stage, how in faults:
            tasks = [asyncio.create_task(run(engine, i)) for i in range(4)]
            steps = engine.status().stats.steps
            await wait_during(tasks, lambda: engine.status().stats.steps >= steps + 20)  # noqa: B023
            kill_worker(stage, how)
            await wait_during(tasks, lambda: engine.status().state != "ready")
            assert engine.accepts_requests
            with pytest.raises(EngineUnavailableError, match="recovering"):
                await engine.reset_prefix_cache()
            assert await asyncio.gather(*tasks) == undisturbed
        status = engine.status()
        assert (status.state, status.epoch) == ("ready", 4)
        assert status.recoveries == {"killed": 2, "frozen": 1}
        assert status.num_resumed_requests == 12
        assert len(status.recovery_seconds) == 3
        await check_kv_events(engine, f"ipc://{tmp_path}/replays")


@pytest.mark.full
async def test_the_example_streams_on(capfd: pytest.CaptureFixture[str]) -> None:
    await survive.main()
    printed = capfd.readouterr().out
    assert f"[{survive.VICTIM} is killed]" in printed
    assert printed.endswith("same text\n") or not HAS_EXACT_TEXTS


async def abandon(engine: Engine) -> None:
    """Leave a long request after its first token: it has to end by itself."""
    stream = engine.generate([9, 9], SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    assert engine.status().num_requests == 0
    await collect(engine, [8])
    assert engine.status().stats.running <= 1


@pytest.mark.full
async def test_priority_runs_first_when_seats_are_few(tiny_model: Path) -> None:
    config = EngineConfig.from_options(
        str(tiny_model), max_num_seqs=1, kv_cache_memory=2**24, threads=1
    )
    async with Engine(config) as engine:
        done: list[int] = []

        async def run(mark: int, priority: int) -> None:
            async for _ in engine.generate([mark], GREEDY, priority=priority):
                pass
            done.append(mark)

        await asyncio.gather(run(1, 0), run(2, 5), run(3, 5), run(4, -1))
        assert done.index(4) < done.index(2) < done.index(3)
