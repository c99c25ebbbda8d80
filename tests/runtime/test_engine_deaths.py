"""A whole engine whose workers die at random moments: every request ends as if none had died."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import pytest

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.engine import Engine
from gllm.kernels.native import library
from gllm.kernels.native.builds import select_build
from tests.runtime.local_workers import LocalWorkers, local_engine

PATIENCE = 240.0
"""Seconds after which something waits for what does not come."""
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer"}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "seed": SamplingParams(seed=3, max_tokens=40, ignore_eos=True),
    "penalties": SamplingParams(
        seed=4,
        max_tokens=40,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 2.0},
        bad_words=("the", "a small"),
        min_tokens=30,
    ),
    "log-probabilities": SamplingParams(
        seed=5, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1
    ),
    "stop string": SamplingParams(seed=6, max_tokens=60, stop=("e",), ignore_eos=True, n=2),
    "choices": SamplingParams(seed=7, max_tokens=40, n=4, logprobs=0, prompt_logprobs=0),
    "grammar": SamplingParams(seed=8, max_tokens=60, n=2, structured=StructuredOutput(json=SCHEMA)),
    "long grammar": SamplingParams(
        seed=9, max_tokens=50, structured=StructuredOutput(regex="[a-f]{30,60}"), logprobs=0
    ),
}


class ChoiceResult(NamedTuple):
    """All that the reader of a choice got."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    end: tuple[Any, ...]


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> Iterator[None]:
    """The selected build for every operation, whatever is measured to be faster."""
    build = select_build()
    if build.path is None:
        pytest.skip(f"a BLAS decides the order of sums: {build.reason}")
    chosen = library.KernelLibrary(build.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_library", lambda: chosen)
        yield


async def generate(engine: Engine, name: str) -> list[ChoiceResult]:
    """The results of a request's choices."""
    params = REQUESTS[name]
    prompt = [11 + len(name), *range(20, 20 + 3 * len(name)), 5]
    deltas: list[list[Any]] = [[] for _ in range(params.n)]
    async for delta in engine.generate(prompt, params):
        deltas[delta.index].append(delta)
    return [
        ChoiceResult(
            "".join(each.text for each in own),
            [token for each in own for token in each.token_ids],
            [entry for each in own for entry in each.logprobs],
            [entry for each in own for entry in each.prompt_logprobs],
            (own[-1].finish_reason, own[-1].stop_reason, own[-1].error),
        )
        for own in deltas
    ]


async def kill_at_random(engine: Engine, workers: LocalWorkers, rng: Random) -> None:
    """Kill workers until this is cancelled, each a few steps after the last recovery."""
    while True:
        begin = engine.status().stats.steps
        num_steps = rng.randint(1, 25)
        while engine.status().state != "ready" or engine.status().stats.steps < begin + num_steps:
            await asyncio.sleep(0.001)
        workers.kill(rng.choice(sorted(workers.workers)))
        while engine.status().state == "ready":
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stages", [1, 2])
async def test_results_do_not_depend_on_deaths(stages: int) -> None:
    options = {"max_prefill_tokens": 24, "min_prefill_tokens": 8, "max_restarts": 100}
    async with local_engine(stages, **options) as (engine, workers):
        expected = {name: await generate(engine, name) for name in REQUESTS}
        assert {result.end[0] for results in expected.values() for result in results} == {
            "stop",
            "length",
        }
        deaths = asyncio.create_task(kill_at_random(engine, workers, Random(stages)))
        for _ in range(2):
            running = [generate(engine, name) for name in REQUESTS]
            results = await asyncio.wait_for(asyncio.gather(*running), PATIENCE)
            assert dict(zip(REQUESTS, results, strict=True)) == expected
        assert not deaths.done()
        deaths.cancel()
        status = engine.status()
        assert sum(status.recoveries.values()) >= 3
        assert status.num_resumed_requests > 5
