"""Step times from a profile: a curve over tokens plus attention, for the measured or another cut.

A stage takes, in seconds,
    curve(tokens) + b chunks + c pairs + d decodes + e decode context + f samples + g arrivals:
the linear model of "Vidur" (arXiv 2405.05465) and others, with a rising piecewise linear curve for
its tokens, because small micro-batches read the weights and large ones compute. Requests that
arrive meanwhile slow a stage down: the driver receives them in the first stage's process, and the
frontend may share its cores. No coefficient is negative, so no stage gets faster with more work.
Steps that other programs interrupted are left out: a profile is of the model, not of its host.

Another cut into stages takes a share of what all measured stages take together. The share is that
of the same layers, embedding and LM head in steps that were measured outside of the pipeline:
    host + layers (curve(tokens) + attention) + embedding tokens + head + f samples.

A server under load is slower than these engines, which have no frontend and no client beside them:
_HostFit says by how much.
"""

from collections.abc import Callable, Sequence
from copy import copy
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import solve_nonnegative
from gllm.sim.costs.base import NO_TRANSFER, CostModel, MeasuredRanges, TransferCost
from gllm.sim.costs.profile import (
    CostProfile,
    HostSamples,
    SpanSample,
    StepSample,
    measure_context,
)
from gllm.sim.hardware.devices import NetworkLink

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens at which the curve may bend."""
ROUNDS = 6
"""Fits of the same samples, each weighted by the predictions of the one before."""
SWEEPS = 3000
"""Passes of the coordinate descent in all rounds together."""
INTERRUPTED = 3.0
"""Times its fitted time that a step, plan or sampling takes at least if another program interrupted
it."""
FILTERS = 4
"""Number of fits: each leaves out samples that the fit before marks as interrupted."""
SOURCE = "the profile"
"""Name of the measurement in messages."""
TOKENS, DECODES, CHUNKS, CONTEXT = "tokens", "decodes", "prefill chunks", "context"
FIXES = {
    TOKENS: "raise --max-num-batched-tokens of `gllm profile`",
    DECODES: "raise --max-num-seqs of `gllm profile`",
    CHUNKS: "lower --max-num-batched-tokens of the engine",
    CONTEXT: "raise --max-model-len of `gllm profile`",
}
"""Fix for a value above the range, by the name of the quantity."""

Array = NDArray[np.float64]
Fit = Callable[[Array, Array], list[float]]
"""Coefficients from features and seconds."""
Span = tuple[int, bool, bool]
"""(number of layers, embedding in front, LM head behind)."""


def fit_nonnegative(features: Array, seconds: Array) -> list[float]:
    """Fit nonnegative linear coefficients that predict step times from features of the steps.

    The fit minimizes errors relative to the prediction, so that they cancel out for short and long
    steps alike; errors relative to the measurement would bias the fit to fast steps.

    Args:
        features: Features of each step, such as numbers of tokens, [steps, features].
        seconds: Measured time of each step, [steps].
    """
    scale = np.maximum(features.max(axis=0), 1e-12)
    scaled = features / scale
    guess = np.full_like(seconds, seconds.mean())
    solution = [0.0] * features.shape[1]
    for _ in range(ROUNDS):
        weighted = scaled / guess[:, None]
        # Not `@`: its threads cost more than these narrow products where the cores are busy.
        matrix = np.einsum("ri,rj->ij", weighted, weighted).tolist()
        right = np.einsum("ri,r->i", weighted, seconds / guess).tolist()
        solution = solve_nonnegative(matrix, right, solution, SWEEPS // ROUNDS)
        guess = np.maximum(np.einsum("ri,i->r", scaled, solution), seconds.min() / 10)
    return (np.array(solution) / scale).tolist()


def fit_uninterrupted(features: Array, seconds: Array) -> list[float]:
    """Fit coefficients as `fit_nonnegative` does, but without steps that were interrupted.

    A step counts as interrupted by another program if it took over 3 times its fitted time.

    Args:
        features: Features of each step, such as numbers of tokens, [steps, features].
        seconds: Measured time of each step, [steps].
    """
    is_kept = np.ones(len(seconds), bool)
    for _ in range(FILTERS):
        coefficients = fit_nonnegative(features[is_kept], seconds[is_kept])
        fitted = np.einsum("ri,i->r", features, coefficients)
        previous, is_kept = is_kept, seconds <= INTERRUPTED * fitted
        if np.array_equal(previous, is_kept):
            break
    return coefficients


def _curve_features(tokens: int) -> list[float]:
    """Return 1 and the length of each piece of the curve below `tokens`, in tokens."""
    ends = [*KNOTS[1:], tokens]
    pieces = zip(KNOTS, ends, strict=True)
    return [1.0, *(float(max(0, min(tokens, end) - begin)) for begin, end in pieces)]


class _StageFit:
    """Coefficients of one stage."""

    def __init__(self, samples: Sequence[StepSample], stage: int) -> None:
        rows = np.array(
            [
                [
                    *_work_features(sample),
                    sample.samples,
                    sample.arrivals[stage] if sample.arrivals else 0,
                ]
                for sample in samples
            ]
        )
        seconds = np.array([max(sample.stages[stage], 1e-7) for sample in samples])
        fitted = fit_uninterrupted(rows, seconds)
        self._coefficients = fitted[:-1]
        self._curve = fitted[: len(KNOTS) + 1]
        *self._others, self.arrival_seconds = fitted[len(KNOTS) + 1 :]
        self._known: dict[int, float] = {}

    def seconds(self, work: StageWork) -> float:
        """Return the time of the stage."""
        curve = self._known.get(work.num_tokens)
        if curve is None:
            features = _curve_features(work.num_tokens)
            curve = sum(a * b for a, b in zip(self._curve, features, strict=True))
            self._known[work.num_tokens] = curve
        chunk, pair, decode, context, sample = self._others
        return (
            curve
            + chunk * len(work.prefill_chunks)
            + pair * work.num_query_key_pairs
            + decode * work.num_decodes
            + context * work.num_decode_context_tokens
            + sample * work.num_sampled_rows
        )

    def seconds_of(self, sample: StepSample) -> float:
        """Return the time of the stage, without arrivals."""
        features = [*_work_features(sample), sample.samples]
        return sum(a * b for a, b in zip(self._coefficients, features, strict=True))


def _fit_excess(features: Array, seconds: Array) -> list[float]:
    """Fit nonnegative coefficients of what steps take beyond their first feature, a time.

    Steps that others interrupted count: where cores are shared, these delay requests too. Errors
    are relative to the first feature.
    """
    base = features[:, 0]
    scale = np.maximum(features.max(axis=0), 1e-12)
    weighted = features / scale / base[:, None]
    matrix = np.einsum("ri,rj->ij", weighted, weighted).tolist()
    right = np.einsum("ri,r->i", weighted, seconds / base - 1.0).tolist()
    solution = solve_nonnegative(matrix, right, [0.0] * features.shape[1], SWEEPS)
    return (np.array(solution) / scale).tolist()


class _HostFit:
    """Fit of a server under load: stretch of its steps, and the way of requests and tokens.

    A step takes
        stretch * alone + a + b sampled tokens + c arrivals
    where `alone` is its time in an engine without frontend and client: these work beside the
    stages, on the same cores, for each step, for each token and for each request. They make no step
    faster: the stretch is at least 1, and the others are not negative.
    """

    def __init__(self, host: HostSamples, fits: Sequence[_StageFit]) -> None:
        rows, seconds = [], []
        for sample in host.steps:
            for stage, fit in enumerate(fits):
                arrivals = sample.arrivals[stage] if sample.arrivals else 0
                rows.append([max(fit.seconds_of(sample), 1e-7), 1.0, sample.samples, arrivals])
                seconds.append(max(sample.stages[stage], 1e-7))
        excess = _fit_excess(np.array(rows), np.array(seconds))
        self._stretch = 1.0 + excess[0]
        _, self._step, self._token, self.arrival_seconds = excess
        ways = [[1.0, request.ahead, float(request.is_busy)] for request in host.requests]
        times = np.array([max(request.seconds, 1e-7) for request in host.requests])
        self._latency, occupancy, self._busy_latency = fit_nonnegative(np.array(ways), times)
        self._occupancy = min(occupancy, self._latency)
        self._delivery = _fit_line(host.deliveries)

    def stage_seconds(self, alone: float, work: StageWork) -> float:
        """Return the time of a step that takes `alone` seconds in an engine without a server."""
        return self._stretch * alone + self._step + self._token * work.num_sampled_rows

    def request_transfer(self, is_busy: bool) -> TransferCost:
        """Return the frontend's and the client's time of a request, and its latency beside it."""
        latency = self._latency - self._occupancy + is_busy * self._busy_latency
        return TransferCost(self._occupancy, latency)

    def delivery_seconds(self, num_tokens: int) -> float:
        """Return a constant plus a time per token."""
        return self._delivery[0] + self._delivery[1] * num_tokens


class _SpanFit:
    """Coefficients of the parts of a model: step, layer, embedding and LM head."""

    def __init__(self, spans: Sequence[SpanSample]) -> None:
        rows = [
            self._features(_work_features(span.step), span.step, _span_of(span)) for span in spans
        ]
        seconds = np.array([max(span.step.stages[0], 1e-7) for span in spans])
        self._coefficients = np.array(fit_nonnegative(np.array(rows), seconds))

    def seconds(self, sample: StepSample, spans: Sequence[Span]) -> float:
        """Return the time of some parts of the model, one step each."""
        work = _work_features(sample)
        rows = [self._features(work, sample, span) for span in spans]
        return float(np.sum(np.array(rows) @ self._coefficients))

    @staticmethod
    def _features(work: Sequence[float], sample: StepSample, span: Span) -> list[float]:
        layers, is_first, is_last = span
        has_head = is_last and sample.samples > 0
        ends = [is_first * sample.tokens, float(has_head), has_head * sample.samples]
        return [1.0, *(layers * value for value in work), *ends]


def _work_features(sample: StepSample) -> list[float]:
    """Return the features of a step without its samples."""
    attention = [sample.chunks, sample.pairs, sample.decodes, sample.decode_context]
    return [*_curve_features(sample.tokens), *attention]


def _span_of(sample: SpanSample) -> Span:
    return sample.layers, sample.is_first, sample.is_last


def _spans_of(layers: Sequence[int]) -> list[Span]:
    """Return the span of each stage."""
    last = len(layers) - 1
    return [(count, stage == 0, stage == last) for stage, count in enumerate(layers)]


class FittedCostModel(CostModel):
    """Cost model fitted to a profile, which `gllm profile` measured on a real pipeline.

    Args:
        profile: Measured step, link, driver and sampling times.
        layers: Number of layers of each stage; default: as measured.
        link: Link between neighbouring stages, if the profile has measured none.
        includes_host: True to include the work of frontend and client, if the profile has measured
            it; False for the engine alone.

    Raises:
        ValueError: The layers do not add up to the model's, or the profile has measured no parts of
            the model, from which it could predict another division into stages.
    """

    def __init__(
        self,
        profile: CostProfile,
        layers: Sequence[int] | None = None,
        link: NetworkLink | None = None,
        includes_host: bool = True,
    ) -> None:
        self._steps = profile.steps
        self._stage_fits: dict[int, _StageFit] = {}
        """By stage; a worker of one stage fits no other."""
        self._measured_spans = _spans_of(profile.layers)
        self._cut: list[Span] | None = None
        self._host_seconds = 0.0
        if layers is not None and list(layers) != profile.layers:
            _check_cut(profile, layers)
            self._cut = _spans_of(layers)
            self._span_fit = _SpanFit(profile.spans)
            if len(layers) > 1:
                self._host_seconds = _measure_host(profile)
        # Other programs do not interrupt messages, they only start their receivers late, often.
        self._link = _fit_line(profile.links)
        self._bytes, self._other_link = profile.activation_bytes, link
        if profile.links:
            self._other_link = None
        self._plan = _fit_line(profile.plans, fit_uninterrupted)
        self._sampling = _fit_line(profile.sampling, fit_uninterrupted)
        self._return = _fit_line(profile.returns)
        self._host: _HostFit | None = None
        if includes_host and profile.host is not None:
            self._add_host(profile.host)
        self._ranges = _measure_ranges(profile.steps)

    def _add_host(self, host: HostSamples) -> None:
        """Take the times between the stages from a server under load, as far as it has them."""
        self._host = _HostFit(host, [self._fit_of(s) for s in range(len(self._measured_spans))])
        self._link = _fit_line(host.links) if host.links else self._link
        self._plan = _fit_line(host.plans) if host.plans else self._plan
        self._sampling = _fit_line(host.sampling) if host.sampling else self._sampling
        self._return = _fit_line(host.returns) if host.returns else self._return

    def with_own_counts(self) -> "FittedCostModel":
        """Return a model with the same fits and zero counts of predictions below the ranges."""
        model = copy(self)
        model._ranges = MeasuredRanges(self._ranges.ranges, SOURCE, FIXES)
        return model

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the fitted time.

        Raises:
            CostRangeError: The micro-batch is above the measured range.
        """
        work = self._clamp(work)
        alone = self._alone_seconds(stage, work)
        return alone if self._host is None else self._host.stage_seconds(alone, work)

    def _alone_seconds(self, stage: int, work: StageWork) -> float:
        """Return the time of a stage in an engine without a server."""
        if self._cut is None:
            return self._fit_of(stage).seconds(work)
        sample = StepSample.of(work, [])
        whole = sum(
            self._fit_of(measured).seconds(work) for measured in range(len(self._measured_spans))
        )
        part = self._span_fit.seconds(sample, [self._cut[stage]])
        share = part / self._span_fit.seconds(sample, self._measured_spans)
        return self._host_seconds + whole * share

    def arrival_seconds(self, stage: int) -> float:
        """Return the fitted time; in another division only the driver's stage has one."""
        if self._host is not None:
            return self._host.arrival_seconds
        if self._cut is None:
            return self._fit_of(stage).arrival_seconds
        return self._fit_of(0).arrival_seconds if stage == 0 else 0.0

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return a fixed latency plus a time per token; all links are equal."""
        if self._other_link is not None:
            size = self._bytes * work.num_tokens
            link = self._other_link
            return TransferCost(size / link.bandwidth, link.latency, size)
        return TransferCost(self._link[1] * work.num_tokens, self._link[0])

    def plan_seconds(self, work: StageWork) -> float:
        """Return the fitted time: a constant plus a time per row."""
        return self._plan[0] + self._plan[1] * _count_rows(work)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the fitted time: a constant plus a time per row."""
        return self._sampling[0] + self._sampling[1] * _count_rows(work)

    def return_seconds(self, work: StageWork) -> float:
        """Return a constant plus a time per sampled token."""
        return self._return[0] + self._return[1] * work.num_sampled_rows

    def request_transfer(self, is_busy: bool) -> TransferCost:
        """Return the fitted cost of frontend and client; NO_TRANSFER if it was not measured.

        is_busy: True if a micro-batch is in flight when the client sends the request.
        """
        return NO_TRANSFER if self._host is None else self._host.request_transfer(is_busy)

    def delivery_seconds(self, num_tokens: int) -> float:
        """Return the fitted seconds of the frontend and the client; 0 if they were not measured."""
        return 0.0 if self._host is None else self._host.delivery_seconds(num_tokens)

    def _fit_of(self, stage: int) -> _StageFit:
        fit = self._stage_fits.get(stage)
        if fit is None:
            fit = self._stage_fits[stage] = _StageFit(self._steps, stage)
        return fit

    def _clamp(self, work: StageWork) -> StageWork:
        """Return the work, at least the smallest that was measured."""
        ranges = self._ranges
        tokens = int(ranges.clamp(TOKENS, work.num_tokens))
        if work.prefill_chunks:
            ranges.clamp(CHUNKS, len(work.prefill_chunks))
        decodes = work.num_decodes
        if decodes:
            decodes = int(ranges.clamp(DECODES, decodes))
        ranges.clamp(CONTEXT, measure_context(work))
        if tokens == work.num_tokens and decodes == work.num_decodes:
            return work
        return work._replace(num_tokens=tokens, num_decodes=decodes)


def _count_rows(work: StageWork) -> int:
    return len(work.prefill_chunks) + work.num_decodes


def _check_cut(profile: CostProfile, layers: Sequence[int]) -> None:
    """Raise ValueError unless a profile can price another cut."""
    total = sum(profile.layers)
    if sum(layers) != total or min(layers, default=0) < 1:
        raise ValueError(
            f"layers is {list(layers)}: every stage needs a layer, and they have to add up to the "
            f"model's {total}"
        )
    if not profile.spans:
        raise ValueError(
            f"the profile has steps of stages of {profile.layers} layers only: measure it again "
            "with `gllm profile`, which also measures parts of the model"
        )
    if len(set(profile.degrees)) > 1:
        raise ValueError(
            f"the profile was measured with {profile.degrees} ranks per stage: measure it with one "
            "--tp for all stages to price another cut"
        )


def _measure_host(profile: CostProfile) -> float:
    """Return the seconds between two steps of a single stage that are not for sampling.

    They are no part of a single stage's steps, because those that wait for tokens end before them.
    Steps of several stages contain them.
    """
    if not (profile.sampling and profile.samplers):
        return 0.0
    constant, slope = _fit_line(profile.samplers)
    rows = median(step.samples for step in profile.steps if step.decodes)
    pause, pause_slope = _fit_line(profile.sampling, fit_uninterrupted)
    return max(0.0, pause - constant + (pause_slope - slope) * rows)


def _measure_ranges(steps: Sequence[StepSample]) -> MeasuredRanges:
    """Return the ranges of a profile's steps.

    Attention is proportional to the context, so contexts have no lower end.
    """
    tokens = [step.tokens for step in steps]
    decodes = [step.decodes for step in steps if step.decodes]
    chunks = [step.chunks for step in steps if step.chunks]
    ranges = {
        TOKENS: (float(min(tokens)), float(max(tokens))),
        DECODES: (float(min(decodes, default=0)), float(max(decodes, default=0))),
        CHUNKS: (float(min(chunks, default=0)), float(max(chunks, default=0))),
        CONTEXT: (0.0, max(step.context for step in steps)),
    }
    return MeasuredRanges(ranges, SOURCE, FIXES)


def _fit_line(
    points: Sequence[tuple[int, float]], fit: Fit = fit_nonnegative
) -> tuple[float, float]:
    """Return (seconds at zero, seconds per unit), neither negative; zeros without points."""
    if not points:
        return 0.0, 0.0
    rows = np.array([[1.0, count] for count, _ in points])
    seconds = np.array([max(value, 1e-7) for _, value in points])
    constant, slope = fit(rows, seconds)
    return constant, slope
