"""Rebalancing: finds a better cut of the layers from measured step times.

It has no clock: time is an argument. `LayerPlanner` passes the stages' totals and logs or uses the
proposals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gllm.recovery.partition import StageCosts, StageMemory, partition_layers


@dataclass(frozen=True)
class BalanceLimits:
    """Conditions under which another division of the layers among the stages is proposed."""

    min_gain: float = 0.15
    """Least gain of throughput, as a share: time of the slowest stage now over that with the better
    division, minus 1."""
    window_seconds: float = 5.0
    """Time over which step times are averaged."""
    num_windows: int = 3
    """Consecutive windows of which each has to show the gain, so that a short disturbance does not
    cost a pause."""
    min_steps: int = 50
    """Steps that each stage computes in a window; a longer window is used under little load."""
    cooldown_seconds: float = 60.0
    """Time after a proposal without another one; doubled by each further proposal."""
    max_cooldown_seconds: float = 3600.0
    """Longest time after a proposal without another one."""


@dataclass(frozen=True)
class BetterPartition:
    """Proposed division of the layers among the stages, with measured and expected step times."""

    layers: tuple[range, ...]
    """Layers of each stage."""
    stage_seconds: tuple[float, ...]
    """Measured mean time of a step on each stage."""
    expected_seconds: tuple[float, ...]
    """Expected mean time of a step on each stage with the new layers."""

    @property
    def gain(self) -> float:
        """Expected relative gain of throughput."""
        return max(self.stage_seconds) / max(self.expected_seconds) - 1


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Number of steps and busy seconds of one stage since the pipeline's last start."""

    num_steps: int = 0
    busy_seconds: float = 0.0

    def since(self, earlier: "StageTotals") -> "StageTotals":
        """Return the steps and busy time since an earlier measurement."""
        return StageTotals(
            self.num_steps - earlier.num_steps, self.busy_seconds - earlier.busy_seconds
        )

    @property
    def mean_seconds(self) -> float:
        """Mean time of a step in seconds."""
        return self.busy_seconds / self.num_steps


class Rebalancer:
    """Proposes a better division of the layers among the stages, from measured step times.

    All stages compute the same steps, so their mean times are comparable whatever the load is. A
    stage's time is taken to be the cost of its layers times an unknown factor, which also holds for
    other divisions. The costs of layers and LM head are measured or follow from the number of
    weights; only their ratios matter.
    """

    def __init__(
        self,
        costs: Sequence[StageCosts],
        memory: Sequence[StageMemory] | None = None,
        limits: BalanceLimits | None = None,
    ) -> None:
        """Create a rebalancer without step times.

        Args:
            costs: cost of each layer on each stage.
            memory: memory of each layer, and limit, on each stage; None without limits.
            limits: conditions of a proposal.
        """
        self._costs = list(costs)
        self._memory = memory
        self._limits = limits or BalanceLimits()
        self._cut: tuple[range, ...] = ()
        self._totals: dict[int, StageTotals] = {}
        self._begin: dict[int, StageTotals] = {}
        """Totals at the start of the window."""
        self._streak: list[dict[int, StageTotals]] = []
        """Work in each consecutive window that showed the gain."""
        self._window_end: float | None = None
        """None before the first window, which begins once every stage has reported."""
        self._num_proposals = 0
        self._quiet_until = -math.inf

    def begin(self, cut: Sequence[range]) -> None:
        """Start to measure step times after a (re)start of the pipeline.

        Args:
            cut: present layers of each stage.
        """
        self._cut = tuple(cut)
        self._totals, self._streak = {}, []
        self._window_end = None

    def on_totals(
        self, stage: int, num_steps: int, busy_seconds: float, now: float
    ) -> BetterPartition | None:
        """Record a stage's totals.

        Return a better partition if it has been better for several windows in a row.

        Args:
            stage: index of the stage.
            num_steps: steps since the start of the epoch.
            busy_seconds: time spent computing them.
            now: time in seconds.
        """
        if not 0 <= stage < len(self._cut):
            return None
        self._totals[stage] = StageTotals(num_steps, busy_seconds)
        if len(self._totals) < len(self._cut):
            return None
        if self._window_end is None or now < self._quiet_until:
            # Without the first steps, in which kernels are compiled and measured.
            self._begin_window(now)
            return None
        if now < self._window_end:
            return None
        work = {stage: total.since(self._begin[stage]) for stage, total in self._totals.items()}
        if any(stage_work.num_steps < self._limits.min_steps for stage_work in work.values()):
            return None
        self._begin_window(now)
        if self._find_better(work) is None:
            self._streak = []
            return None
        self._streak.append(work)
        if len(self._streak) < self._limits.num_windows:
            return None
        better = self._find_better({total: _add_up(self._streak, total) for total in self._totals})
        self._streak = []
        if better is not None:
            self._cool_down(now)
        return better

    def _begin_window(self, now: float) -> None:
        self._begin = dict(self._totals)
        self._window_end = now + self._limits.window_seconds

    def _cool_down(self, now: float) -> None:
        """Propose nothing for a while, longer after each proposal that followed another soon."""
        limits = self._limits
        if now - self._quiet_until > limits.max_cooldown_seconds:
            self._num_proposals = 0
        doubled = limits.cooldown_seconds * 2.0**self._num_proposals
        seconds = min(doubled, limits.max_cooldown_seconds)
        self._quiet_until = now + seconds
        self._num_proposals = min(self._num_proposals + 1, 32)

    def _find_better(self, work: dict[int, StageTotals]) -> BetterPartition | None:
        """Return the best cut under some step times; None if its gain is too small.

        work: of each stage in a window.
        """
        seconds = [work[stage].mean_seconds for stage in range(len(self._cut))]
        scaled = []
        for costs, part, measured in zip(self._costs, self._cut, seconds, strict=True):
            expected = costs.cost_of(part.start, part.stop)
            if expected <= 0 or measured <= 0:
                return None
            scaled.append(costs.scale(measured / expected))
        try:
            best = tuple(partition_layers(scaled, self._memory))
        except ValueError:
            # The present cut was made by hand and does not fit the estimate of the memory.
            return None
        expected_seconds = tuple(
            costs.cost_of(part.start, part.stop) for costs, part in zip(scaled, best, strict=True)
        )
        better = BetterPartition(best, tuple(seconds), expected_seconds)
        return better if better.gain > self._limits.min_gain else None


def _add_up(windows: Sequence[dict[int, StageTotals]], stage: int) -> StageTotals:
    """Return the work of a stage over several windows."""
    return StageTotals(
        sum(window[stage].num_steps for window in windows),
        sum(window[stage].busy_seconds for window in windows),
    )
