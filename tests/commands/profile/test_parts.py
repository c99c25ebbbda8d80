"""Steps of parts of a model, and what a profile predicts from them."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from experiments.logged_servers import serve_round_robin
from gllm.commands.bench.real import RoundRobinLock, run_logged
from gllm.commands.profile import parts
from gllm.commands.profile.command import make_sweep_workloads, with_min_seconds
from gllm.commands.profile.parts import (
    count_span_steps,
    list_spans,
    list_steps,
    measure_samplers,
    measure_spans,
)
from gllm.commands.profile.span import TimedSpan, count_blocks
from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import CostProfile, SpanSample, StepSample, build_profile
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest


def config(stages: int = 1) -> EngineConfig:
    return EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=stages,
        threads=1,
        dtype="float32",
        max_model_len=1024,
        ridge_tokens=10**9,  # Prompts are not cut, so that all engines have the same steps.
    )


def test_parts_of_a_model() -> None:
    """As many layers as a device holds, half of them at both ends, and one in the middle."""
    assert list_spans(6, 6) == [range(6), range(3), range(3, 6), range(3, 4)]
    assert list_spans(32, 8) == [
        range(8), range(24, 32), range(4), range(28, 32), range(16, 17),
    ]  # fmt: skip
    assert list_spans(1, 1) == [range(1)]


def test_parts_take_the_least_seconds_of_a_step() -> None:
    for seconds, least, expected in ((0.01, 0.05, 0.05), (0.07, 0.05, 0.07), (0.01, 0.0, 0.01)):
        step = StepSample.of(StageWork(0, 4, (), 4, 40, 4), [seconds])
        span = with_min_seconds(SpanSample(3, True, False, step), least)
        assert span.step.stages == [expected]
        assert (span.layers, span.step.decodes) == (3, 4)


def test_steps_are_within_the_longest_text() -> None:
    for longest in (8, 100, 960, 4096):
        steps = list_steps(longest)
        assert max(start + tokens for rows in steps for start, tokens in rows) == longest
        assert any(len(rows) > 16 for rows in steps)
    assert count_blocks([(0, 16), (16, 1), (31, 1)], 16) == 5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_some_layers_has_its_work(num_ranks: int) -> None:
    rows = [(100, 1), (0, 30), (12, 5)]
    with TimedSpan(
        config(), read_config(DEMO), DEMO, range(2, 6), [rows], num_ranks
    ) as span:  # fmt: skip
        work, seconds = span.repeat_step(rows, 2)
        assert not span.executor.is_first
        assert span.executor.is_last
    assert (work.num_tokens, work.num_decodes, work.num_sampled_rows) == (36, 1, 3)
    assert work.prefill_chunks == ((0, 30), (12, 5))
    assert 0 < seconds < 10


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, {(1, True, False), (1, False, True), (1, False, False)}),
        pytest.param(
            6,
            {(6, True, True), (3, True, False), (3, False, True), (1, False, False)},
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_demo_in_parts(most: int, expected: set[tuple[int, bool, bool]]) -> None:
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    samples = measure_spans(config(), Path(DEMO), [most], 40, on_step=count, repeats=1)
    assert num_steps == len(samples) == count_span_steps(6, [most], 40)
    kinds = {(sample.layers, sample.is_first, sample.is_last) for sample in samples}
    assert kinds == expected
    assert {sample.step.samples > 0 for sample in samples if sample.is_last} == {True, False}
    assert all(sample.step.stages[0] > 0 for sample in samples)
    samplers = measure_samplers(config(), Path(DEMO))
    assert [rows for rows, _ in samplers] == list(parts.DECODE_BATCHES)
    assert all(0 < seconds < 1 for _, seconds in samplers)


def test_a_sweep_reaches_the_limits_of_the_engine() -> None:
    workloads = make_sweep_workloads(2, 1024, max_num_seqs=100, max_tokens=2560)
    lengths = [job.num_prompt_tokens + job.num_output_tokens for jobs in workloads for job in jobs]
    assert max(lengths) == 1024
    assert max(sum(job.num_prompt_tokens for job in jobs) for jobs in workloads) >= 2 * 2560
    decodes = [len(jobs) for jobs in workloads if jobs[0].num_output_tokens > 1]
    assert 64 in decodes
    assert 128 not in decodes


LOADS = [
    *([WorkloadRequest(0.0, tokens, 1)] for tokens in (32, 48, 64, 96, 128, 160, 192)),
    *([WorkloadRequest(0.0, 200, 30)] * batch for batch in (2, 8, 16)),
]
CONTEXT_GRID = 64
"""Contexts of decodes within so many tokens count as equal."""
TURNS = 8
"""Times that each load is served by each engine."""
MIN_PREFILLS, MIN_DECODES = TURNS // 2, 100
"""Equal steps of which the shortest counts. Those that occur seldom do not: a batch of decodes has
one in passing while it fills or empties."""


def fastest(steps: Iterable[StepSample]) -> list[StepSample]:
    """Return each step that was computed often, with its shortest times.

    Other programs make a step longer, never shorter.
    """
    groups: dict[tuple[float, ...], list[StepSample]] = defaultdict(list)
    for step in steps:
        context = step.decode_context // (CONTEXT_GRID * max(1, step.decodes))
        key = (step.tokens, step.chunks, step.pairs, step.decodes, context)
        groups[key].append(step)
    return [
        msgspec.structs.replace(group[0], stages=[*map(min, *(step.stages for step in group))])
        for group in groups.values()
        if len(group) >= (MIN_DECODES if group[0].decodes else MIN_PREFILLS)
    ]


async def profile_both() -> list[CostProfile]:
    """Return profiles of the demo at one and at two stages, which take turns."""
    turns = RoundRobinLock(2)

    async def profile(stages: int) -> CostProfile:
        log = await run_logged(
            config(stages), lambda engine: serve_round_robin(engine, LOADS * TURNS, turns)
        )
        return build_profile([build_run_record(log)], {})

    return list(await asyncio.gather(profile(1), profile(2)))


def work_of(step: StepSample) -> StageWork:
    """Return the work of a step of decodes, or of one chunk."""
    chunks = ((round(step.pairs / step.tokens - (step.tokens + 1) / 2), step.tokens),)
    return StageWork(
        0,
        step.tokens,
        chunks if step.chunks else (),
        step.decodes,
        step.decode_context,
        step.samples,
    )


@pytest.mark.long
def test_one_stage_predicts_two() -> None:
    """Steps of a kind together: both stages within 15 %, each of them within 25 %."""
    measured, real = asyncio.run(profile_both())
    measured = msgspec.structs.replace(
        measured,
        steps=fastest(measured.steps),
        sampling=[min(measured.sampling)],
        spans=measure_spans(config(), Path(DEMO), measured.layers, 900),
        samplers=measure_samplers(config(), Path(DEMO)),
    )
    cost = FittedCostModel(measured, real.layers)
    for is_decode in (False, True):
        steps = [
            step
            for step in fastest(real.steps)
            if bool(step.decodes) == is_decode and step.chunks <= 1 - is_decode
        ]
        assert len(steps) >= 3
        works = [work_of(step) for step in steps]
        predicted = [sum(cost.stage_seconds(stage, work) for work in works) for stage in range(2)]
        took = [sum(step.stages[stage] for step in steps) for stage in range(2)]
        assert sum(predicted) == pytest.approx(sum(took), rel=0.15), is_decode
        # A stage of a third of the tiny model computes a decode in 0.2 ms.
        assert predicted == pytest.approx(took, rel=0.25), is_decode
