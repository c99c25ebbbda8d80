"""Cache of experts on a device: where each chosen expert is computed, and which ones stay there.

Weights of the experts are in the memory of the host. An expert that a layer's tokens have chosen is
computed by the device if its weights are there, else by the host, or by the device after a copy if
that takes less time: moving weights takes the same time for any number of rows, computing on the
host does not. What the device would have saved by having an expert, summed over the steps with a
decay, decides which experts stay.

Everything here is pure; steps are the only time.

Sources: Kamahori et al., "Fiddler: CPU-GPU Orchestration for Fast Inference of Mixture-of-Experts
Models" (2024), for the choice between computing and moving; Chen et al., "KTransformers" (2025).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

HORIZON_STEPS = 1000
"""Steps over which uses of an expert count: the decay per step is 1 - 1 / HORIZON_STEPS."""
SIGNIFICANCE = 5.0
"""Standard deviations by which the saved time of an expert has to exceed that of the one that it
replaces. Uses are counted as if independent; without this, equally likely experts would replace
each other for ever."""


class ExpertCosts(NamedTuple):
    """Measured times of one expert of a layer, in seconds."""

    host: float
    """Time of an expert on the host, besides its rows: reading its weights."""
    host_row: float
    """Time of one row on the host."""
    copy: float
    """Time of moving the weights of an expert to the device."""
    device: float
    """Time of an expert on the device, besides its rows."""
    device_row: float = 0.0
    """Time of one row on the device."""

    def host_seconds(self, num_rows: float) -> float:
        """Return the time of an expert with so many rows on the host."""
        return self.host + num_rows * self.host_row

    def device_seconds(self, num_rows: float) -> float:
        """Return the time of an expert with so many rows on the device, its weights there."""
        return self.device + num_rows * self.device_row

    def saved_seconds(self, num_rows: float) -> float:
        """Return the time that the device saves with the weights of an expert; at least 0."""
        return max(0.0, self.host_seconds(num_rows) - self.device_seconds(num_rows))


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Places at which the chosen experts of one layer are computed in one step."""

    on_host: tuple[int, ...]
    """Experts that the host computes, ascending."""
    resident: tuple[tuple[int, int], ...]
    """Experts that the device computes, whose weights it has, each with its slot, ascending."""
    copied: tuple[tuple[int, int | None], ...]
    """Experts that the device computes after a copy of their weights, each with the slot that keeps
    them; None for weights that are used once. They are copied after the device has computed
    `resident`."""


class _Uses:
    """Decayed sum of the time that having an expert saves, and its variance."""

    __slots__ = ("saved", "step", "variance")

    def __init__(self) -> None:
        self.saved = self.variance = 0.0
        self.step = 0

    def advance(self, step: int, decay: float) -> None:
        """Let the sums decay until a step."""
        factor = decay ** (step - self.step)
        self.saved, self.variance, self.step = self.saved * factor, self.variance * factor**2, step


class ExpertCache:
    """Decides for one layer which experts a device has, and where each one is computed.

    The object is deterministic: equal calls give equal plans.
    """

    def __init__(self, num_experts: int, num_slots: int, horizon: int = HORIZON_STEPS) -> None:
        """Create an empty cache.

        Args:
            num_experts: experts of the layer.
            num_slots: experts whose weights the device can keep.
            horizon: steps over which uses count.
        """
        self.num_slots = min(num_slots, num_experts)
        self._decay = 1 - 1 / horizon
        self._uses = [_Uses() for _ in range(num_experts)]
        self._step = 0
        self._slots: dict[int, int] = {}
        self.num_exchanges = 0
        """Experts that have replaced others."""

    @property
    def slots(self) -> Mapping[int, int]:
        """Slot of each expert whose weights the device has."""
        return self._slots

    def plan(self, num_rows: Mapping[int, int], costs: ExpertCosts) -> ExpertPlan:
        """Return where the experts of the next step are computed.

        The caller carries the plan out: `slots` has the copied experts from now on.

        Args:
            num_rows: rows of each chosen expert, above 0.
            costs: of an expert of this layer.
        """
        self._step += 1
        resident = tuple(sorted((e, self._slots[e]) for e in num_rows if e in self._slots))
        for expert, count in num_rows.items():
            uses, saved = self._uses[expert], costs.saved_seconds(count)
            uses.advance(self._step, self._decay)
            uses.saved += saved
            uses.variance += saved**2
        missing = sorted(num_rows.keys() - self._slots.keys())
        copied: dict[int, int | None] = {}
        admitted = max(
            missing, key=lambda expert: (self._uses[expert].saved, -expert), default=None
        )
        if admitted is not None and (slot := self._find_slot(admitted, costs)) is not None:
            self._slots[admitted] = slot
            copied[admitted] = slot
        for expert in missing:
            moved = costs.copy + costs.device_seconds(num_rows[expert])
            if expert not in copied and moved < costs.host_seconds(num_rows[expert]):
                copied[expert] = None
        on_host = tuple(expert for expert in missing if expert not in copied)
        return ExpertPlan(on_host, resident, tuple(sorted(copied.items())))

    def _find_slot(self, expert: int, costs: ExpertCosts) -> int | None:
        """Return the slot that an expert should get, after evicting its owner; None for none.

        At most one expert is admitted per step, so that a change of the load delays no step by
        many copies.
        """
        candidate = self._uses[expert]
        if candidate.saved <= costs.copy:
            return None
        if len(self._slots) < self.num_slots:
            return len(self._slots)
        if not self._slots:
            return None
        for owner in self._slots:
            self._uses[owner].advance(self._step, self._decay)
        victim = min(self._slots, key=lambda owner: (self._uses[owner].saved, owner))
        least = self._uses[victim]
        noise = SIGNIFICANCE * math.sqrt(candidate.variance + least.variance)
        if candidate.saved - least.saved <= costs.copy + noise:
            return None
        self.num_exchanges += 1
        return self._slots.pop(victim)
