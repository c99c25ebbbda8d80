"""Cost profile: step times of a real pipeline, stored in a file; costs/fitted.py fits them."""

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec

from gllm.observability.latency import RequestTimeline
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.metrics.run_record import RunRecord, ServedRequest, StepCosts, measure_step_costs

FORMAT_VERSION = 3
SECONDS_DECIMALS = 7
"""Decimals of stored times."""
DEBUG_STEP_SECONDS = "debug_step_seconds"
"""Optional key of a profile's `machine`: the smallest step time in seconds."""

Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured step of a pipeline: size of its batch, and its time on each stage in seconds."""

    tokens: Count
    chunks: Count
    pairs: NonNegative
    decodes: Count
    decode_context: Count
    samples: Count
    context: NonNegative
    """Tokens of the longest sequence at the end of its prefill chunk, or the mean context of the
    decodes, if that is longer."""
    stages: Annotated[list[NonNegative], msgspec.Meta(min_length=1)]
    """Time of the step on each stage in seconds."""
    arrivals: list[Count] = []
    """Number of requests that arrived while each stage was computing; empty: none."""

    @classmethod
    def of(
        cls, work: StageWork, seconds: list[float], arrivals: Sequence[int] = ()
    ) -> "StepSample":
        """Return the sample of a step from its batch and measured times."""
        return cls(
            work.num_tokens,
            len(work.prefill_chunks),
            work.num_query_key_pairs,
            work.num_decodes,
            work.num_decode_context_tokens,
            work.num_sampled_rows,
            measure_context(work),
            [round(max(0.0, value), SECONDS_DECIMALS) for value in seconds],
            list(arrivals) if any(arrivals) else [],
        )


class SpanSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured step of some consecutive layers that were loaded alone, outside of a pipeline.

    From such steps a cost model predicts other divisions of the layers into stages.
    """

    layers: PositiveCount
    """Number of measured layers."""
    is_first: bool
    """True if the embedding was measured with them."""
    is_last: bool
    """True if the final norm and the LM head were measured with them."""
    step: StepSample
    """Batch of the step; its only time is that of these layers."""


class RequestTransferSample(msgspec.Struct, frozen=True, array_like=True):
    """One request on its way from the client through the frontend to the driver."""

    ahead: Count
    """Requests that had been sent before it and had not reached the driver."""
    is_busy: bool
    """True if a micro-batch was in flight when it was sent."""
    seconds: NonNegative
    """Time from the client's send until the driver had added it to the scheduler."""


class HostSamples(msgspec.Struct, frozen=True):
    """Times of a server under load, with its frontend and its client on the same machine.

    The stages share their cores with the driver, the frontend and the client, and requests and
    tokens take time to cross these.
    """

    steps: Annotated[list[StepSample], msgspec.Meta(min_length=1)]
    links: list[tuple[Count, float]]
    """As in CostProfile, like the three fields that follow."""
    plans: list[tuple[Count, float]]
    sampling: list[tuple[Count, float]]
    returns: list[tuple[Count, float]]
    requests: Annotated[list[RequestTransferSample], msgspec.Meta(min_length=1)]
    deliveries: list[tuple[Count, NonNegative]]
    """(sampled tokens of the step, seconds from its commit until the client has a token of it, on
    average), for each step."""


class CostProfile(msgspec.Struct, frozen=True):
    """File format of `gllm profile`: measured step, link, driver and sampling times."""

    model: str
    layers: Annotated[list[PositiveCount], msgspec.Meta(min_length=1)]
    """Number of layers of each stage."""
    scheduler: SchedulerConfig
    """Resolved scheduler configuration of the measurement."""
    machine: dict[str, str]
    """Description of the machine: device, threads, dtype, versions, and test options that slow it
    down."""
    steps: list[StepSample]
    """Measured steps."""
    links: list[tuple[Count, float]]
    """(tokens in the batch, seconds from the end of a stage to the start of the next), for steps
    where the next stage was idle."""
    plans: list[tuple[Count, float]]
    """(sequences in the batch, seconds from the event that led the driver to plan it until the
    first stage's start), for steps where that stage was idle."""
    sampling: list[tuple[Count, float]]
    """(sequences in the batch, seconds from the stage's end to the next step's start), for steps
    that waited for sampled tokens; only pipelines of one stage."""
    returns: list[tuple[Count, float]]
    """(sampled tokens, seconds from the last stage's end until the driver has handled the
    result)."""
    degrees: list[PositiveCount] = []
    """Number of tensor-parallel ranks of each stage; empty: one each."""
    spans: list[SpanSample] = []
    """Steps of parts of the model, from which other divisions into stages are predicted; may be
    empty."""
    samplers: list[tuple[Count, float]] = []
    """(sequences in the batch, seconds) of the sampler alone, measured outside of the pipeline."""
    activation_bytes: Count = 0
    """Size of one token's activations on a link between stages in bytes; 0 if unknown."""
    host: HostSamples | None = None
    """The same model served over HTTP; None: not measured."""
    format: int = FORMAT_VERSION

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Flags of `gllm serve` for an engine on one core with the measured step times."""
        facts = self.machine
        flags: dict[str, Any] = {"threads": 1}
        if facts.get("dtype", "auto") != "auto":
            flags["dtype"] = facts["dtype"]
        if DEBUG_STEP_SECONDS in facts:
            flags["debug-step-seconds"] = float(facts[DEBUG_STEP_SECONDS])
        return flags


def measure_context(work: StageWork) -> float:
    """Return the longest context in a batch, in tokens: of a prefill chunk, or the decodes' mean.

    Args:
        work: Size of the batch.
    """
    longest = max((start + tokens for start, tokens in work.prefill_chunks), default=0)
    if not work.num_decodes:
        return longest
    return max(longest, work.num_decode_context_tokens / work.num_decodes)


def build_profile(runs: list[RunRecord], machine: dict[str, str]) -> CostProfile:
    """Build a cost profile from the records of real runs of one pipeline.

    Args:
        runs: Records of runs; the model and configuration are taken from the first.
        machine: Description of the machine: device, threads, dtype and versions.
    """
    start = runs[0].start
    profile = CostProfile(
        start.model,
        start.layers,
        start.scheduler,
        machine,
        [],
        [],
        [],
        [],
        [],
        degrees=start.degrees,
    )
    for run in runs:
        for costs in measure_step_costs(run):
            _add_step(profile, costs)
    return profile


def build_host_samples(
    run: RunRecord, requests: Sequence[tuple[RequestTimeline, ServedRequest]]
) -> HostSamples:
    """Build the samples of a server under load.

    Steps that were planned while none of the requests was served are left out.

    Args:
        run: Record of the server's step log.
        requests: Timelines of the requests at the client, each with its record in the log. Both
            have the times of one clock.
    """
    host = HostSamples([], [], [], [], [], [], [])
    host.requests.extend(_sample_requests(run, requests))
    spans = sorted((line.arrival, line.times[-1]) for line, _ in requests if line.times)
    sent = [begin for begin, _ in spans]
    # Of the requests sent until a time, the latest end.
    served_until = [-inf, *accumulate((end for _, end in spans), max)]
    served_run = replace(
        run,
        micro_batches=[
            step
            for step in run.micro_batches
            if served_until[bisect(sent, step.planned_time)] >= step.planned_time
        ],
    )
    for costs in measure_step_costs(served_run):
        _add_step(host, costs)
    num_rows = {
        step.committed_time: step.work.num_sampled_rows
        for step in run.micro_batches
        if step.committed_time is not None
    }
    delays: dict[float, list[float]] = defaultdict(list)
    for line, served in requests:
        # Of two tokens that the client read at once it is not known which is which.
        if len(line.times) == len(served.line.times):
            for received, committed in zip(line.times, served.line.times, strict=True):
                delays[committed].append(max(0.0, received - committed))
    host.deliveries.extend(
        (num_rows[committed], round(fmean(seconds), SECONDS_DECIMALS))
        for committed, seconds in delays.items()
        if committed in num_rows
    )
    return host


def _sample_requests(
    run: RunRecord, requests: Sequence[tuple[RequestTimeline, ServedRequest]]
) -> Iterator[RequestTransferSample]:
    """Yield the samples of requests, in the order in which the client sent them."""
    batches = sorted((step.planned_time, step.committed_time or inf) for step in run.micro_batches)
    # Of the micro-batches planned until a time, the latest commit.
    planned = [begin for begin, _ in batches]
    committed = list(accumulate((end for _, end in batches), max))
    pairs = sorted((line.arrival, served.line.arrival) for line, served in requests)
    received: list[float] = []
    for sent, added in pairs:
        num_planned = bisect(planned, sent)
        is_busy = num_planned > 0 and committed[num_planned - 1] > sent
        ahead = len(received) - bisect(received, sent)
        yield RequestTransferSample(ahead, is_busy, round(max(0.0, added - sent), SECONDS_DECIMALS))
        insort(received, added)


def _add_step(profile: CostProfile | HostSamples, costs: StepCosts) -> None:
    """Add the times of a step to a profile."""
    work = costs.step.work
    stages, sampling = split_sampling(costs)
    num_rows = len(work.prefill_chunks) + work.num_decodes
    if sampling is not None:
        profile.sampling.append((num_rows, round(sampling, SECONDS_DECIMALS)))
    profile.steps.append(StepSample.of(work, stages, costs.num_arrivals))
    profile.returns.append((work.num_sampled_rows, round(costs.return_seconds, SECONDS_DECIMALS)))
    if costs.plan_seconds is not None:
        profile.plans.append((num_rows, round(costs.plan_seconds, SECONDS_DECIMALS)))
    waits = [wait for wait in costs.link_seconds if wait is not None]
    profile.links.extend((work.num_tokens, round(wait, SECONDS_DECIMALS)) for wait in waits)


def split_sampling(costs: StepCosts) -> tuple[list[float], float | None]:
    """Return a step's time on each stage without sampling, and the sampling time it waited for.

    On a pipeline of one stage, sampling runs between two steps if the second needs the tokens of
    the first. The time is then subtracted from that of the stage.

    Args:
        costs: Measured times of the step.

    Returns:
        Seconds on each stage, and seconds of sampling; None if the step did not wait for it.
    """
    if not costs.step.work.has_placeholders or costs.plan_seconds is not None:
        return costs.stage_seconds, None
    (times,) = costs.step.stage_times
    assert times is not None, "costs have complete times"
    computed = times.end - times.start
    return [computed], costs.stage_seconds[0] - computed


def write_profile(profile: CostProfile, path: str | Path) -> None:
    """Write a cost profile to a JSON file.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_bytes(msgspec.json.encode(profile))


def read_profile(path: str | Path) -> CostProfile:
    """Read a cost profile that `gllm profile` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a profile.
    """
    content = Path(path).read_bytes()
    try:
        version = msgspec.json.decode(content, type=_FormatOnly).format
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format {version}, not {FORMAT_VERSION}: measure it again with "
                "`gllm profile`"
            )
        profile = msgspec.json.decode(content, type=CostProfile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a profile written by `gllm profile`: {error}") from None
    if not profile.steps:
        raise ValueError(f"{path} has no steps: measure it again with `gllm profile`")
    _check_stages(profile, path)
    return profile


def _check_stages(profile: CostProfile, path: str | Path) -> None:
    """Raise ValueError unless ranks and steps are of as many stages as the profile has."""
    stages = len(profile.layers)
    lengths = {"degrees": {len(profile.degrees)} - {0}}
    lengths["stages in steps"] = {len(step.stages) for step in profile.steps}
    lengths["arrivals in steps"] = {len(step.arrivals) for step in profile.steps} - {0}
    if profile.host is not None:
        lengths["stages in steps of host"] = {len(step.stages) for step in profile.host.steps}
        lengths["arrivals in steps of host"] = {len(s.arrivals) for s in profile.host.steps} - {0}
    for field, found in lengths.items():
        if found - {stages}:
            raise ValueError(
                f"{path} is not a profile written by `gllm profile`: layers has {stages} stages, "
                f"but {field} {min(found - {stages})}: measure it again"
            )


class _FormatOnly(msgspec.Struct):
    """The version of a profile, which tells whether the rest can be read."""

    format: int
