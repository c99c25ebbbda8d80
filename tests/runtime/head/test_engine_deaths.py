"""A whole engine whose workers die at random moments: every request ends as if none had died."""

import asyncio
from random import Random
from typing import Any, NamedTuple

import pytest

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.engine import Engine
from gllm.kernels.native.builds import select_build
from tests.support.engines.local_workers import LocalWorkers, local_engine

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
def compiled_kernels() -> None:
    """A build that computes every operation, as a named one does."""
    build = select_build()
    if build.path is None:
        pytest.skip(f"a BLAS decides the order of sums: {build.reason}")
    assert build.is_named


class Readers:
    """Readers of requests, and how far each of them has come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_deltas: dict[str, int] = {}
        """Deltas of each running request."""

    async def generate(self, name: str) -> list[ChoiceResult]:
        """Return the results of a request's choices."""
        params = REQUESTS[name]
        prompt = [11 + len(name), *range(20, 20 + 3 * len(name)), 5]
        deltas: list[list[Any]] = [[] for _ in range(params.n)]
        self.num_deltas[name] = 0
        async for delta in self.engine.generate(prompt, params):
            deltas[delta.index].append(delta)
            self.num_deltas[name] += 1
        del self.num_deltas[name]
        return results_of(deltas)

    async def run_all(self) -> dict[str, list[ChoiceResult]]:
        """Run all requests at the same time."""
        results = await asyncio.gather(*map(self.generate, REQUESTS))
        return dict(zip(REQUESTS, results, strict=True))

    async def wait_for_progress(self) -> None:
        """Wait until each request has new output: no death is then any request's fault."""
        begin = dict(self.num_deltas)
        while any(self.num_deltas.get(name) == count for name, count in begin.items()):
            await asyncio.sleep(0.001)


def results_of(deltas: list[list[Any]]) -> list[ChoiceResult]:
    """Join the deltas of each choice."""
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


async def kill_at_random(readers: Readers, workers: LocalWorkers, rng: Random) -> None:
    """Kill workers until this is cancelled, each a few steps after requests have gone on."""
    engine = readers.engine
    while True:
        while engine.status().state != "ready":
            await asyncio.sleep(0.001)
        await readers.wait_for_progress()
        end = engine.status().stats.steps + rng.randint(1, 10)
        while engine.status().stats.steps < end:
            await asyncio.sleep(0.001)
        workers.kill(rng.choice(sorted(workers.workers)))
        while engine.status().state == "ready":
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("stages", "degrees", "num_rounds"),
    [
        (2, (1,), 1),
        pytest.param(2, (1,), 2, marks=pytest.mark.full),
        pytest.param(1, (1,), 2, marks=pytest.mark.full),
        pytest.param(1, (2,), 2, marks=pytest.mark.full),
        pytest.param(2, (2, 1), 2, marks=pytest.mark.long),
        pytest.param(2, (1, 2), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_results_do_not_depend_on_deaths(
    stages: int, degrees: tuple[int, ...], num_rounds: int
) -> None:
    options: dict[str, Any] = {
        "max_prefill_tokens": 24,
        "min_prefill_tokens": 8,
        "max_restarts": 100,
        "tensor_parallel_size": degrees,
    }
    async with local_engine(stages, **options) as (engine, workers):
        readers = Readers(engine)
        expected = await readers.run_all()
        ends = {result.end[0] for results in expected.values() for result in results}
        assert ends == {"stop", "length"}
        deaths = asyncio.create_task(kill_at_random(readers, workers, Random(stages)))
        for _ in range(num_rounds):
            assert await asyncio.wait_for(readers.run_all(), PATIENCE) == expected
        assert not deaths.done()
        deaths.cancel()
        status = engine.status()
        assert sum(status.recoveries.values()) >= 2 * num_rounds - 1
        assert status.num_resumed_requests > 5
