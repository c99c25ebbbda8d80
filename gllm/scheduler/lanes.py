"""Lanes: the two orders of steps in a pipeline over weak links, and who goes first in a stage.

With two lanes every step is either one of decodes or one of prefill. Order holds within a lane; a
decode step may overtake prefill steps on every link, in every stage and at the driver.
docs/scheduler.md says why that is safe.
"""

DECODE_LANE, PREFILL_LANE = 0, 1
"""Lanes of steps; with one lane all steps are in lane 0."""
LANE_NAMES = ("auto", "1", "2")
"""Values of --lanes."""
MAX_OVERTAKES = 8
"""Decode steps that a stage computes while a prefill step is ready, before it computes that one. It
bounds the wait of a prompt at a stage that decodes keep busy."""


class LaneOrder:
    """Chooses the lane whose oldest step a stage computes next."""

    def __init__(self) -> None:
        self._num_overtakes = 0
        """Decode steps chosen since a prefill step has been ready."""

    def choose(self, has_decode: bool, has_prefill: bool) -> int | None:
        """Return the lane of the next step; None if no step is ready.

        Args:
            has_decode: the next step of the decode lane has its plan and its activations.
            has_prefill: the same of the prefill lane.
        """
        if has_decode and not (has_prefill and self._num_overtakes >= MAX_OVERTAKES):
            self._num_overtakes += has_prefill
            return DECODE_LANE
        self._num_overtakes = 0
        return PREFILL_LANE if has_prefill else None
