"""Steps that fail in a whole engine: who ends, who goes on, and what is left of them."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.engine import Engine
from gllm.engine.interface import OutputDelta
from gllm.text.grammar.guide import TOKEN_SECONDS
from tests.support.engines.local_workers import failing, local_engine

PATIENCE = 50.0
"""Seconds: a request that takes longer waits for something that does not come."""
DIGITS = SamplingParams(
    temperature=0.0, max_tokens=60, structured=StructuredOutput(regex="[0-9]{40,60}")
)


async def collect(engine: Engine, prompt: list[int], params: SamplingParams) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, params)]


@pytest.mark.parametrize(
    "place", ["prepare", "sample", pytest.param("compute", marks=pytest.mark.full)]
)
async def test_a_failed_step_with_a_grammar_holds_nobody_up(
    place: str,
) -> None:
    """The next step was planned already, and would wait for the token of the one that failed."""
    assert PATIENCE < TOKEN_SECONDS
    bad: set[int] = set()
    with failing(lambda where, stage, step: where == place and step in bad):
        async with local_engine() as (engine, _):
            guided = engine.generate([5, 6], DIGITS)
            await anext(guided)
            bad.add(engine.status().stats.steps + 3)
            ends = [delta async for delta in guided]
            other = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            newcomer = await asyncio.wait_for(collect(engine, [7, 8], other), PATIENCE)
    assert ends[-1].finish_reason == "error"
    assert f"{place} of step" in ends[-1].error
    assert newcomer[-1].finish_reason == "length"


def requests(count: int, chance: random.Random) -> Iterator[tuple[list[int], SamplingParams]]:
    """Short ones, some with several choices, some with a grammar."""
    for _ in range(count):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=chance.randrange(1, 7),
            ignore_eos=True,
            n=chance.choice((1, 1, 3)),
        )
        if chance.random() < 0.2:
            params = replace(DIGITS, max_tokens=5)
        yield [chance.randrange(3, 200) for _ in range(chance.randrange(1, 40))], params


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_failed_steps_leave_nothing_behind(stages: int) -> None:
    """Three steps of a hundred fail, anywhere; some requests are abandoned at once."""
    chance = random.Random(stages)
    faults = random.Random(7)
    places = [(place, stage) for place in ("prepare", "compute") for stage in range(stages)]
    places.append(("sample", stages - 1))
    fates = [faults.choice(places) if faults.random() < 0.03 else None for _ in range(10_000)]
    failed: set[int] = set()
    has_ended = False

    def fault(place: str, stage: int, step: int) -> bool:
        fails = not has_ended and step > 3 and fates[step] == (place, stage)
        failed.update([step] * fails)
        return fails

    async def run(engine: Engine, prompt: list[int], params: SamplingParams, left: int) -> str:
        """How a request ends that is abandoned before its last choices, or before its first."""
        (request,) = await engine.submit([prompt], params)
        reason = ""
        for _ in range(left):
            await request.wait()
            for delta in request.pop_deltas():
                reason = delta.finish_reason or reason
            if request.is_finished:
                break
        request.close()
        return reason

    with failing(fault):
        async with local_engine(stages, max_num_seqs=4) as (engine, workers):
            pending = [
                run(engine, prompt, params, chance.choice((0, 1, *[99] * 8)))
                for prompt, params in requests(240, chance)
            ]
            reasons = await asyncio.gather(*pending)
            assert len(failed) > 5
            assert reasons.count("error") > 10
            has_ended = True
            await collect(engine, [3], SamplingParams(max_tokens=3, ignore_eos=True))
            # What ended last is told to the stages with the next step.
            assert len(set[int]().union(*(each.held_seqs for each in workers.executors))) == 1
