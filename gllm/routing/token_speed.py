"""Speed of an engine's tokens in relation to its own earlier speed, as its router sees it."""

from collections import deque
from collections.abc import Collection, Sequence
from statistics import fmean, median

from gllm.routing.state import EngineSnapshot, median_coefficients
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients

MIN_GAPS = 8
"""Gaps between tokens whose mean is measured."""
MAX_ABSENT_OUTPUTS = 16
"""Outputs without the observed sequence after which it is taken to have ended."""
MIN_STALL_SECONDS = 5.0
"""Shortest time without a step that counts as slow."""
NUM_BASELINE_SAMPLES = 60
"""Samples whose median is the normal speed of an engine."""
MIN_BASELINE_SAMPLES = 5
"""Samples before which an engine has no normal speed: the first ones alone may be far from it."""
HEALTHY_SLOWDOWN = 1.5
"""Slowdown below which the normal speed follows the measured one, and the cost model the fit."""
RECENT_SECONDS = 10.0
"""Age up to which a measured speed is compared with that of others."""


class TokenSpeed:
    """Measures by what factor an engine's time between tokens exceeds its normal time.

    The normal time is predicted for the engine's load by a step cost model, and compared with the
    gaps between the tokens of a sequence, which include delays of stages, links and host. The
    engine fits that cost model anew all the time, so that of a slow engine soon predicts slow
    steps; the prediction uses the coefficients of when the engine was healthy.
    """

    def __init__(self) -> None:
        self.coefficients: StepCostCoefficients | None = None
        """Step cost model of the healthy engine; None until the engine has fitted one."""
        self.slowdown = 1.0
        """Latest time per token in relation to the normal one."""
        self._measured_at: float | None = None
        self._gaps: list[float] = []
        """Since the last sample, in seconds."""
        self._observed: int | None = None
        """Sequence whose gaps are measured."""
        self._observed_at = 0.0
        """Time of its last token."""
        self._num_absent = 0
        """Outputs without this sequence since then."""
        self._sampled: SchedulerStats | None = None
        """Statistics at the last sample; None while the engine is idle."""
        self._progress = 0, 0.0
        """Number of steps, and the time at which it was first reported."""
        self._baseline: deque[float] = deque(maxlen=NUM_BASELINE_SAMPLES)
        """Measured over predicted time of healthy samples."""

    def is_recent(self, now: float) -> bool:
        """Return True if `slowdown` was measured within RECENT_SECONDS."""
        return self._measured_at is not None and now - self._measured_at <= RECENT_SECONDS

    def on_outputs(self, wire_ids: Collection[int], now: float) -> None:
        """Record which sequences got a token in an output of the engine."""
        if self._observed in wire_ids:
            self._gaps.append(now - self._observed_at)
        elif self._observed is None or self._num_absent >= MAX_ABSENT_OUTPUTS:
            self._observed = next(iter(wire_ids), None)
        else:
            self._num_absent += 1
            return
        self._observed_at, self._num_absent = now, 0

    def measure(
        self, snapshot: EngineSnapshot, typical: Sequence[StepCostCoefficients], now: float
    ) -> bool:
        """Measure the slowdown since the last report; called with each report of the engine.

        Args:
            snapshot: state of the engine in its report.
            typical: step cost models of other engines, to find an engine that never had a step.
            now: time of the report in seconds.

        Returns:
            True if there is a new value of `slowdown`.
        """
        stats = snapshot.stats
        self.coefficients = self.coefficients or snapshot.coefficients
        if snapshot.state != "ready" or not stats.unfinished or stats.steps < self._progress[0]:
            self._gaps.clear()
            self._observed = self._sampled = None
            self._progress = stats.steps, now
            return False
        costs = self.coefficients or median_coefficients(typical)
        if stats.steps == self._progress[0] and self._sampled is not None:
            return costs is not None and self._measure_stall(snapshot, costs, now)
        self._progress = stats.steps, now
        earlier, self._sampled = self._sampled, self._sampled or stats
        if earlier is None or self.coefficients is None or len(self._gaps) < MIN_GAPS:
            return False
        # A busy router reads several outputs at once: their gaps are about 0, and a longer one
        # follows. The mean stays.
        gap = fmean(self._gaps)
        self._gaps.clear()
        self._sampled = stats
        ratio = gap / max(1e-9, _predict_gap(snapshot, earlier, self.coefficients))
        if len(self._baseline) < MIN_BASELINE_SAMPLES:
            self._baseline.append(ratio)
            return False
        baseline = median(self._baseline)
        if not baseline:
            # All outputs were read at once, so no gap says anything.
            self._baseline.append(ratio)
            return False
        self._set_slowdown(ratio / baseline, now)
        if self.slowdown < HEALTHY_SLOWDOWN:
            self._baseline.append(ratio)
            self._follow_fit(snapshot, earlier)
        return True

    def _measure_stall(
        self, snapshot: EngineSnapshot, costs: StepCostCoefficients, now: float
    ) -> bool:
        """Measure a time without any step against the longest step that there can be."""
        seconds = now - self._progress[1]
        longest = costs.step + costs.token * snapshot.max_num_batched_tokens
        longest += costs.pair * snapshot.max_num_batched_tokens**2
        longest *= snapshot.num_stages
        if seconds < max(longest, MIN_STALL_SECONDS):
            return False
        self._set_slowdown(seconds / max(1e-3, longest), now)
        return True

    def _set_slowdown(self, slowdown: float, now: float) -> None:
        self.slowdown, self._measured_at = slowdown, now

    def _follow_fit(self, snapshot: EngineSnapshot, earlier: SchedulerStats) -> None:
        """Use the engine's present fit; the baseline keeps its meaning if the model changes."""
        new, old = snapshot.coefficients, self.coefficients
        if new is None or old is None or new == old:
            return
        before = _predict_gap(snapshot, earlier, old)
        change = before / max(1e-9, _predict_gap(snapshot, earlier, new))
        scaled = [ratio * change for ratio in self._baseline]
        self._baseline.clear()
        self._baseline.extend(scaled)
        self.coefficients = new


def _predict_gap(
    snapshot: EngineSnapshot, earlier: SchedulerStats, costs: StepCostCoefficients
) -> float:
    """Return the predicted time between two tokens of a sequence since earlier statistics.

    A sequence gets a token each time that its micro-batch has passed all stages. Lengths of the
    prompts are unknown; they are taken to be those of the running sequences.
    """
    stats, num_stages = snapshot.stats, snapshot.num_stages
    num_steps = max(1, stats.steps - earlier.steps)
    num_prefills = (stats.prefill_tokens - earlier.prefill_tokens) / num_steps
    num_decodes = (stats.decode_tokens - earlier.decode_tokens) / num_steps
    mean_context = stats.decode_context_tokens / max(1, stats.running)
    seconds = costs.step + costs.token * (num_prefills + num_decodes)
    seconds += costs.pair * num_prefills * mean_context / 2
    seconds += (costs.decode + costs.context_token * mean_context) * num_decodes
    return num_stages * seconds
