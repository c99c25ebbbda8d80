"""Interference in a micro-batch on this machine's engine.

Composes each micro-batch by its arrivals: decodes are running, then prompts arrive while a step is
computed, so that the next step has them all.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from statistics import median
from typing import Any

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.interference import (
    REFERENCE,
    InterferencePlan,
    MixedStep,
    StepTimes,
    interference_claims,
    interference_panels,
    interference_tables,
)
from gllm.commands.bench.real import run_logged
from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.observability.step_log import StepLogEvent
from gllm.sim.metrics.plots import plot_grid
from gllm.sim.metrics.run_record import build_run_record

PLAN = InterferencePlan(
    light_peers=(1, 7, 31),
    heavy_peers=(1, 3),
    decode_batches=(1, 8, 32),
    prompts=(18, 128, 512),
    mixed_batch=32,
)
"""The demo model has a context of 1,024 tokens."""
QUICK_PLAN = InterferencePlan(
    light_peers=(1,),
    heavy_peers=(1,),
    decode_batches=(1, 4),
    prompts=(18, 512),
    mixed_batch=4,
    heavy_shares=(0.0, 0.5, 1.0),
)
ROUNDS = 5
MAX_ROUNDS = 15
"""Rounds after which a micro-batch that never had the wanted composition is an error."""
DECODE_TOKENS = 24
"""Tokens that each decode generates."""
PLUG_TOKENS = 768
"""Prompt that keeps the engine busy while the prompts of a step without decodes arrive."""


class StepMeasurement:
    """Micro-batches of a plan on a running engine, and their times."""

    def __init__(self, plan: InterferencePlan) -> None:
        self._steps = plan.all_steps()
        self._rng = random.Random(0)

    async def serve(self, engine: Engine, rounds: int, steps: Sequence[MixedStep]) -> None:
        """Let the engine compute micro-batches of the plan in each round."""
        for _ in range(rounds):
            for step in steps:
                await self._serve_step(engine, step)

    async def _serve_step(self, engine: Engine, step: MixedStep) -> None:
        """Start the decodes, and the prompts when all decodes have their first token."""
        started = [asyncio.Event() for _ in step.contexts]
        async with asyncio.TaskGroup() as group:
            for context, event in zip(step.contexts, started, strict=True):
                group.create_task(self._generate(engine, context, DECODE_TOKENS, event))
            for event in started:
                await event.wait()
            if step.prompts and not step.contexts:
                group.create_task(self._generate(engine, PLUG_TOKENS, 1))
                await asyncio.sleep(0)
            for prompt in step.prompts:
                group.create_task(self._generate(engine, prompt, 1))

    async def _generate(
        self,
        engine: Engine,
        num_prompt_tokens: int,
        num_tokens: int,
        first: asyncio.Event | None = None,
    ) -> None:
        """Generate from a random prompt. Raises RuntimeError where the request fails."""
        prompt = self._rng.choices(range(engine.model.vocab_size), k=num_prompt_tokens)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async with aclosing(engine.generate(prompt, params)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise RuntimeError(f"a request failed: {delta.error}")
                if first is not None:
                    first.set()

    def read_times(self, events: Iterable[StepLogEvent]) -> StepTimes:
        """Return the median seconds of each micro-batch that the log has."""
        samples: dict[tuple[tuple[int, ...], int], list[tuple[int, float]]] = defaultdict(list)
        for batch in build_run_record(events).micro_batches:
            times = batch.stage_times[0]
            if times is not None:
                chunks = tuple(sorted(tokens for _, tokens in batch.work.prefill_chunks))
                samples[chunks, batch.work.num_decodes].append(
                    (batch.work.num_decode_context_tokens, times.end - times.start)
                )
        found: StepTimes = {}
        for step in self._steps:
            least, num_decodes = sum(step.contexts), len(step.contexts)
            most = least + DECODE_TOKENS * num_decodes
            seconds = [
                each
                for context, each in samples[tuple(sorted(step.prompts)), num_decodes]
                if least <= context <= most
            ]
            if seconds:
                found[step] = median(seconds)
        return found


def measure_steps(plan: InterferencePlan, rounds: int, model: str, **options: Any) -> StepTimes:
    """Return the times of all micro-batches of a plan on an engine of this machine.

    Args:
        plan: The micro-batches.
        rounds: Times that each is computed at first.
        model: Model of the engine.
        options: Further options of the engine.

    Raises:
        RuntimeError: A micro-batch never had the wanted composition.
    """
    config = EngineConfig.from_options(
        model,
        policy="sarathi",
        max_num_batched_tokens=8192,
        prefix_cache=False,
        # While one step is computed, nothing else is planned: prompts that come then run together.
        max_in_flight=1,
        **options,
    )
    measurement = StepMeasurement(plan)
    times: StepTimes = {}
    missing = plan.all_steps()
    for count in (rounds, MAX_ROUNDS):
        serve = partial(measurement.serve, rounds=count, steps=missing)
        found = measurement.read_times(asyncio.run(run_logged(config, serve)))
        times |= {step: found[step] for step in missing if step in found}
        missing = [step for step in plan.all_steps() if step not in times]
        if not missing:
            return times
    raise RuntimeError(f"no micro-batch was {missing[0]} in {MAX_ROUNDS} rounds")


def run(options: ExperimentOptions) -> ExperimentResult:
    """Time all micro-batches on the demo model."""
    # Threads of one stage wait for each other, which takes several times as long on a machine that
    # does other work too.
    plan, rounds, threads = (QUICK_PLAN, 2, 1) if options.quick else (PLAN, ROUNDS, None)
    name = "demo, this machine"
    series = {name: measure_steps(plan, rounds, "demo", threads=threads)}
    text = (
        f"The demo model on this machine at one stage, medians over {rounds} rounds or more. Times "
        "are those of the stage, from its step log.\n\n" + interference_tables(series, plan)
    )
    return ExperimentResult(
        "Interference in a micro-batch, real engine",
        text,
        interference_claims(name, series[name], plan),
        {"interference-real.svg": lambda path: plot_grid(interference_panels(series, plan), path)},
        REFERENCE,
    )
