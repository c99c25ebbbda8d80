"""The embeddable engine: blocking and asynchronous, with real workers."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from gllm.config.engine import EngineConfig
from gllm.config.field_types import FieldError
from gllm.config.kv_events import KvEventsConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine, EngineError
from gllm.engine.interface import EmbeddingError, EngineUnavailableError, OutputDelta
from gllm.engine.llm import LLM
from gllm.runtime.kv_publisher import short_hash
from gllm.runtime.local_node import LocalNode
from tests.support.engines.kv_driver import KvFollower
from tests.support.engines.kv_subscriber import Subscriber, request_replay

POISON = 300
"""A token whose embedding is not a number."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def poisoned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with one token that computes to nothing."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 2}')
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, poisoned: Path) -> Iterator[LLM]:
    with LLM(
        str(poisoned),
        progress=False,
        pipeline_parallel_size=request.param,
        kv_cache_memory=2**24,
        threads=1,
    ) as made:
        yield made


def test_prompts_come_back_in_order_with_all_choices(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=2, max_tokens=6, seed=1, ignore_eos=True)
    mixed: Any = [[7, 8], "Hello", "Hello"]
    outputs = llm.generate(mixed, params)
    assert [output.prompt for output in outputs] == [[7, 8], "Hello", "Hello"]
    assert all(len(output.outputs) == 2 for output in outputs)
    assert outputs[1].outputs == outputs[2].outputs
    assert {c.finish_reason for output in outputs for c in output.outputs} == {"length"}
    assert outputs[1].outputs[0].token_ids != outputs[1].outputs[1].token_ids


@pytest.mark.parametrize("stages", [1, 2])
async def test_embeddings_are_transformers_last_hidden_states(
    tiny_model: Path, stages: int
) -> None:
    import torch
    import transformers

    model = transformers.Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = [[7], [7, 8, 9], list(range(5, 105))]
    options: dict[str, Any] = {"pipeline_parallel_size": stages, "dtype": "float32", "threads": 1}
    options["max_num_batched_tokens"] = 48
    async with Engine(EngineConfig.from_options(str(tiny_model), **options)) as engine:
        made = await asyncio.gather(*(engine.embed(prompt) for prompt in [*prompts, *prompts]))
        with pytest.raises(FieldError):
            await engine.embed([])
    for prompt, vector in zip([*prompts, *prompts], made, strict=True):
        with torch.inference_mode():
            (wanted,) = model.model(torch.tensor([prompt])).last_hidden_state[:, -1].tolist()
        assert vector == pytest.approx(wanted, abs=1e-4)


def test_an_embedding_that_is_no_number_is_told(llm: LLM) -> None:
    def embed(prompt: list[int]) -> list[float]:
        embedding = llm._engine.embed(prompt)
        return asyncio.run_coroutine_threadsafe(embedding, llm._loop).result()

    with pytest.raises(EmbeddingError, match="finite"):
        embed([7, POISON])
    assert len(embed([7])) == 48


def test_a_cache_in_fp8_is_half_as_large(tiny_model: Path) -> None:
    sizes = []
    for kept in ("auto", "fp8"):
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": kept}
        with LLM(str(tiny_model), progress=False, max_num_seqs=4, threads=1, **options) as made:
            (output,) = made.generate([[7, 8]], GREEDY)
            assert len(output.outputs[0].token_ids) == 10
            sizes.append(
                (made._engine.status().num_kv_blocks, made._engine.status().kv_cache_bytes)
            )
    assert sizes[1] == (sizes[0][0], sizes[0][1] // 2)


def test_attention_that_cannot_be_ends_the_start(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="attention_backend triton does not compute on device cpu"):
        LLM(str(tiny_model), progress=False, device="cpu", attention_backend="triton")
    # What only a worker knows: whether there is a GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = "--attention-backend triton: does not compute on a CPU; choose auto"
    with pytest.raises(EngineError, match=wanted):
        LLM(str(tiny_model), progress=False, attention_backend="triton")


def test_without_parameters_the_models_defaults_hold(llm: LLM) -> None:
    assert llm._engine.model.defaults == {"temperature": 0.0}
    one, two = llm.generate([[5] * 500, [5] * 500])
    assert one.outputs == two.outputs


def test_a_chat(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert len(answer.outputs[0].token_ids) == 10


def test_a_request_that_cannot_be_computed_ends_alone(llm: LLM) -> None:
    alone = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids

    async def both() -> tuple[list[OutputDelta], list[OutputDelta]]:
        good = collect(llm._engine, [5, 6, 7])
        bad = collect(llm._engine, [5, POISON, 7])
        return await asyncio.gather(good, bad)

    good, bad = asyncio.run_coroutine_threadsafe(both(), llm._loop).result()
    assert [t for delta in good for t in delta.token_ids] == alone
    assert bad[-1].finish_reason == "error"
    assert "not finite" in bad[-1].error
    with pytest.raises(EngineError, match="not finite"):
        llm.generate([[POISON]], GREEDY)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == alone


async def collect(
    engine: Engine, prompt: list[int], params: SamplingParams = GREEDY
) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, params)]


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompt in ([], [402], [-1], [5] * 512):
        with pytest.raises(FieldError):
            llm.generate([[5], prompt], GREEDY)


async def test_the_asynchronous_engine(tiny_model: Path) -> None:
    config = EngineConfig.from_options(
        str(tiny_model), pipeline_parallel_size=2, kv_cache_memory=2**24, max_restarts=0, threads=1
    )
    async with Engine(config) as engine:
        await abandon(engine)
        streams = [collect(engine, [5, i]) for i in range(20)]
        answers = await asyncio.gather(*streams)
        assert all(deltas[-1].finish_reason == "length" for deltas in answers)
        assert engine.status().num_requests == 0
        assert engine.status().is_healthy
        waiting = asyncio.ensure_future(collect(engine, [5] * 300))
        await asyncio.sleep(0)
        kill_worker(engine, 1)
        last = (await waiting)[-1]
        assert (last.finish_reason, "SIGKILL" in last.error) == ("error", True)
        assert not engine.status().is_healthy
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await collect(engine, [5])


def kill_worker(engine: Engine, stage: int, how: int = signal.SIGKILL) -> None:
    """Send a signal to the worker process of a stage."""
    supervisor = engine._supervisor
    assert isinstance(supervisor.node, LocalNode)
    worker = supervisor.node.workers[supervisor.senders[stage]]
    os.kill(worker.process.pid, how)


async def check_kv_events(engine: Engine, replays: str) -> None:
    """A subscriber that reads all published events knows what the engine has cached now."""
    follower, context = KvFollower(), zmq.asyncio.Context()
    engine._supervisor.kv_events.subscribe(follower)
    subscriber = Subscriber(context, "", 16)
    for number, payload in await request_replay(replays, bytes(8)):
        subscriber.apply(number, payload)
    context.destroy(linger=0)
    assert subscriber.numbers == list(range(len(subscriber.numbers)))
    assert subscriber.num_cleared >= engine.status().generation
    assert subscriber.blocks.keys() == {short_hash(digest) for digest in follower.digests} != set()
    assert {tokens[0] for _, tokens in subscriber.prefixes()} == {5}


async def wait_during(tasks: list[asyncio.Task[Any]], condition: Callable[[], bool]) -> None:
    """Wait for a condition that comes true while tasks run. Raises the error of a task."""
    while not condition():
        ended = [each for each in tasks if each.done()]
        await asyncio.gather(*ended)
        assert len(ended) < len(tasks), "the tasks ended before the condition came true"
        await asyncio.sleep(0.01)


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
        freeze_timeout=1.0,
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
            kill_worker(engine, stage, how)
            await wait_during(tasks, lambda: engine.status().state != "ready")
            assert engine.status().accepts_requests
            with pytest.raises(EngineUnavailableError, match="recovering"):
                await engine.reset_prefix_cache()
            assert await asyncio.gather(*tasks) == undisturbed
        status = engine.status()
        assert (status.state, status.generation) == ("ready", 4)
        assert status.recoveries == {"killed": 2, "frozen": 1}
        assert status.num_resumed_requests == 12
        assert len(status.recovery_seconds) == 3
        await check_kv_events(engine, f"ipc://{tmp_path}/replays")


async def abandon(engine: Engine) -> None:
    """Leave a long request after its first token: it has to end by itself."""
    stream = engine.generate([9, 9], SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    assert engine.status().num_requests == 0
    await collect(engine, [8])
    assert engine.status().stats.running <= 1


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
