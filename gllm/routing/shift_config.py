"""Options of a router that watches its workload for lasting shifts."""

from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.options import option
from gllm.routing.shift_detector import ShiftRule


@dataclass(frozen=True)
class ShiftConfig:
    """Detection of shifts: on or off, and the limits of a lasting shift."""

    detect_shifts: bool = option(
        False,
        "watch the lengths and the rate of requests; publish lasting shifts in GET /engines, after "
        "which a plan is worth a new search, and the lengths in GET /workload",
    )
    shift_window: int = option(
        ShiftRule.window,
        "requests of a window; two windows are the profile, and two in a row with the same change "
        "are a shift",
        ge=2,
        le=100_000,
    )
    shift_change: float = option(
        ShiftRule.relative_change,
        "least change of the mean prompt, output or time between arrivals, as a share of the "
        "profile; it is also at least 3 standard errors",
        gt=0,
    )

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)

    @property
    def rule(self) -> ShiftRule:
        """Limits of a lasting shift."""
        return ShiftRule(window=self.shift_window, relative_change=self.shift_change)
