"""Break down the time of a decode step into phases.

An engine serves one batch of decodes with the step log on. Then each phase runs again alone on the
recorded steps: scheduling, message encoding, building inputs, computing, sampling, transferring
activations, detokenizing. The time of a served step beyond the phases on its critical path is
waiting and switching between threads and processes. Run as `python -m benchmarks.cpu.phases --model
FOLDER`; it prints the tables and writes them to docs/benchmarks/phases.md.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import uvloop

from benchmarks.cpu.page import make_parser, origin, write_results
from benchmarks.cpu.rounds import RoundRunner, start_round_runner
from gllm.config.engine import EngineConfig
from gllm.messages.codec import decode_for_driver, decode_for_head, decode_for_stage, encode
from gllm.messages.requests import EngineOutputs
from gllm.messages.steps import RunStep, StepDone
from gllm.models.hub import resolve_model
from gllm.observability.logged_scheduler import to_scheduler_request
from gllm.observability.step_log import (
    AddEvent,
    CommitEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogEvent,
)
from gllm.scheduler.plan import StepOutput, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
DECODERS: dict[type, Callable[[bytes], object]] = {
    RunStep: decode_for_stage,
    StepDone: decode_for_driver,
    EngineOutputs: decode_for_head,
}
"""The decoder of each message's receiver."""
SERVED = "served step"
"""Phase from a step's start on the first stage to the start of the next step there."""


class Setting(NamedTuple):
    """Stages and decodes of one measurement."""

    stages: int
    layers: tuple[int, ...] | None
    """Layers per stage.

    Two stages of the model of benchmarks/cpu/model.py take equally long for a decode with 16 and 8
    layers: its head costs as much as eight layers.
    """
    requests: int
    batch: int
    """Decodes per micro-batch."""


SETTINGS = {
    "One stage, 1 decode": Setting(1, None, 1, 1),
    "One stage, 16 decodes": Setting(1, None, 16, 16),
    "Two stages, 16 decodes in each micro-batch": Setting(2, (16, 8), 32, 16),
}

Seconds = dict[int, float]
"""Seconds by step number."""


class Replay:
    """Replay of one run's scheduler calls that times each phase of the driver.

    Args:
        events: A step log, from its start.
    """

    def __init__(self, events: list[StepLogEvent]) -> None:
        start = events[0]
        assert isinstance(start, StartEvent), "the first event of a step log"
        self._scheduler = Scheduler(start.scheduler)
        self.plans: dict[int, StepPlan] = {}
        self.outcomes: dict[int, StepOutput] = {}
        self.schedule_seconds: Seconds = {}
        self.encode_seconds: Seconds = {}
        for event in events[1:]:
            self._call(event)

    def _call(self, event: StepLogEvent) -> None:
        match event:
            case AddEvent():
                self._scheduler.add(to_scheduler_request(event), event.time)
            case StageTimesEvent():
                self._scheduler.record_step_times(event.stage, event.steps)
            case ScheduleEvent():
                begin = time.perf_counter()
                plan = self._scheduler.schedule(event.time)
                self._scheduler.available_parallelism()
                if plan is not None:
                    self.plans[plan.step] = plan
                    self._add(self.schedule_seconds, plan.step, begin)
                    self._encode(RunStep(plan), plan.step)
            case CommitEvent():
                self._commit(event.result)

    def _commit(self, result: StepResult) -> None:
        self._encode(StepDone(result), result.step)
        begin = time.perf_counter()
        outcome = self._scheduler.commit(result)
        stats = self._scheduler.stats()
        self._add(self.schedule_seconds, result.step, begin)
        self.outcomes[result.step] = outcome
        self._encode(EngineOutputs(outcome, stats), result.step)

    def _encode(self, message: RunStep | StepDone | EngineOutputs, step: int) -> None:
        decode = DECODERS[type(message)]
        begin = time.perf_counter()
        decode(encode(message))
        self._add(self.encode_seconds, step, begin)

    @staticmethod
    def _add(seconds: Seconds, step: int, begin: float) -> None:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - begin


def detokenize_seconds(outcomes: dict[int, StepOutput], tokenizer: Tokenizer) -> Seconds:
    """Return the time to turn each step's tokens into text."""
    texts: dict[int, IncrementalDetokenizer] = {}
    seconds = {}
    for step, outcome in outcomes.items():
        for seq in outcome.seqs:
            texts.setdefault(seq, IncrementalDetokenizer(tokenizer))
        begin = time.perf_counter()
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            texts[seq].push([token])
        seconds[step] = time.perf_counter() - begin
    return seconds


def decode_steps(plans: Iterable[StepPlan], batch: int) -> list[int]:
    """Return the numbers of the steps that consist of `batch` decodes of one token each."""
    return [
        plan.step
        for plan in plans
        if len(plan.rows) == batch and all(row.num_tokens == 1 for row in plan.rows)
    ]


async def measure_round(
    runner: RoundRunner, tokenizer: Tokenizer, setting: Setting, seed: int
) -> dict[str, float]:
    """Serve one batch of requests and replay its steps.

    Returns:
        Median milliseconds of a full decode step: SERVED and one entry for each phase.
    """
    num_old_events = len(runner.events)
    await runner.serve(
        [WorkloadRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * setting.requests, seed
    )
    await runner.read_new_events()
    run = build_run_record(runner.events, warm_ups=True)
    replay = Replay(runner.events)
    new_plans = (
        event.plan
        for event in runner.events[num_old_events:]
        if isinstance(event, ScheduleEvent) and event.plan is not None
    )
    steps = decode_steps(new_plans, setting.batch)
    starts = [
        times.start
        for step in steps
        if (times := run.micro_batches[step].stage_times[0]) is not None
    ]
    phases: dict[str, Seconds] = {
        "schedule": replay.schedule_seconds,
        "encode messages": replay.encode_seconds,
    }
    stages = await asyncio.to_thread(runner.loops.phase_seconds)
    for number, stage_phases in enumerate(stages):
        phases |= {f"{name}, stage {number}": stage_phases[name] for name in stage_phases}
    phases["detokenize"] = detokenize_seconds(replay.outcomes, tokenizer)
    medians = {name: median(seconds[step] for step in steps) for name, seconds in phases.items()}
    medians[SERVED] = median(after - before for before, after in pairwise(starts))
    return {name: 1e3 * value for name, value in medians.items()}


async def measure(config: EngineConfig, setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each phase in each round, after one round that does not count."""
    config = replace(config, pipeline_parallel_size=setting.stages, layers=setting.layers or "auto")
    tokenizer = Tokenizer.load(resolve_model(config.model))
    async with start_round_runner(config) as runner:
        measured = [
            await measure_round(runner, tokenizer, setting, seed) for seed in range(rounds + 1)
        ]
    return {name: [each[name] for each in measured[1:]] for name in measured[0]}


def phase_table(measured: dict[str, list[float]], stages: int) -> str:
    """Return the table of one setting: phases, their share of a served step, and the remainder."""
    served = median(measured[SERVED])
    critical = served * stages
    rows = []
    for name, values in measured.items():
        if name != SERVED:
            spread = f"{min(values):.3f} to {max(values):.3f}"
            value = median(values)
            rows.append([name, f"{value:.3f}", spread, f"{value / critical:.1%}"])
    total = sum(median(values) for name, values in measured.items() if name != SERVED)
    rows.append(["all phases", f"{total:.3f}", "", f"{total / critical:.1%}"])
    rows.append(
        ["waiting and switching", f"{critical - total:.3f}", "", f"{1 - total / critical:.1%}"]
    )
    return format_table(["phase", "ms", "spread", "share"], rows)


def format_page(measured: dict[str, dict[str, list[float]]], rounds: int) -> str:
    """Return the figures in words and tables."""
    parts = [
        f"{origin('benchmarks.cpu.phases')} Rounds: {rounds}, medians of their medians; prompts of "
        f"{PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} new ones. The share is that of the time from "
        "a micro-batch's start to its next start: with two stages, two served steps."
    ]
    for name, phases in measured.items():
        served = median(phases[SERVED])
        parts.append(f"### {name}\n\nOne step every {served:.2f} ms.")
        parts.append(phase_table(phases, SETTINGS[name].stages))
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print the tables and write the page."""
    parser = make_parser(__doc__, "phases", rounds=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    config = EngineConfig.from_options(
        options.model, dtype=options.dtype, max_model_len=1024, kv_cache_memory=2**29
    )
    measured = {
        name: uvloop.run(measure(config, setting, options.rounds))
        for name, setting in SETTINGS.items()
    }
    title = "Where the time of a decode step goes"
    write_results(options.output, title, format_page(measured, options.rounds), measured)


if __name__ == "__main__":
    main()
