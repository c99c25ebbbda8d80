"""Lanes: the two orders of steps in a pipeline over weak links, and who goes first in a stage.

With two lanes every step is either one of decodes or one of prefill. Order holds within a lane; a
decode step may overtake prefill steps on every link, in every stage and at the driver.
docs/scheduler.md says why that is safe. Over links that turn out to be fast the driver mixes both
phases, and all steps are in the prefill lane.
"""

DECODE_LANE, PREFILL_LANE = 0, 1
"""Lanes of steps; with one lane all steps are in lane 0."""
LANE_NAMES = ("auto", "1", "2")
"""Values of --lanes."""
MAX_OVERTAKES = 8
"""Decode steps that a stage computes while a prefill step is ready, before it computes that one. It
bounds the wait of a prompt at a stage that decodes keep busy."""


class LaneOrder:
    """Chooses whether a stage computes its next decode step or its next prefill step.

    Used if decode steps may overtake prefill steps (`--lanes 2`). Decodes go first, but after
    MAX_OVERTAKES of them a waiting prefill step runs.
    """

    def __init__(self) -> None:
        self._num_overtakes = 0
        """Decode steps chosen since a prefill step has been ready."""

    def choose(self, has_decode: bool, has_prefill: bool) -> int | None:
        """Return the lane of the next step, DECODE_LANE or PREFILL_LANE; None if no step is ready.

        Args:
            has_decode: the plan and the activations of the next decode step have arrived.
            has_prefill: those of the next prefill step have arrived.
        """
        if has_decode and not (has_prefill and self._num_overtakes >= MAX_OVERTAKES):
            self._num_overtakes += has_prefill
            return DECODE_LANE
        self._num_overtakes = 0
        return PREFILL_LANE if has_prefill else None
