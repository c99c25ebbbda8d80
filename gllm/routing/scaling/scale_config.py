"""Options of a router that decides how many engines there should be."""

from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.options import MAX_TIMEOUT_SECONDS, option


@dataclass(frozen=True)
class ScaleConfig:
    """Router options for autoscaling: limits of the number of engines, and times."""

    scale: str | None = option(
        None,
        "MIN:MAX: publish how many engines are wanted, between these limits, by the rate and the "
        "queue time of requests; with MIN 0, none after --scale-idle-seconds without a request. "
        "`gllm up`, Kubernetes or Ray start and stop them",
        is_common=True,
    )
    scale_engine_rate: float | None = option(
        None,
        "requests per second that one engine sustains within the SLO, as `gllm plan scale` prints; "
        "default: predicted from the step times that engines measure and the lengths of requests",
        gt=0,
    )
    scale_engine_offset: float = option(
        0.0,
        "engines in addition to the rate divided by --scale-engine-rate, before the sum is rounded "
        "up; may be negative: c5 of the rule that `gllm plan scale` prints",
        ge=-1e6,
        le=1e6,
    )
    scale_startup_seconds: float = option(
        30.0,
        "time from the start of an engine until it serves, until the router has measured it",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    scale_idle_seconds: float = option(
        300.0, "seconds without a request after which no engine is wanted", gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )  # fmt: skip
    scale_down_seconds: float = option(
        120.0,
        "stabilization window: fewer engines are wanted once fewer have sufficed for this long",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    scale_queue_seconds: float = option(
        2.0,
        "time that requests may wait for an engine or in its queue; from there on one more engine "
        "is wanted",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
        self.limits()

    @property
    def is_on(self) -> bool:
        """True if the router decides how many engines should run."""
        return self.scale is not None

    def limits(self) -> tuple[int, int]:
        """Return the minimum and maximum number of engines; 0, 0 without scaling.

        Raises:
            ValueError: The text is not MIN:MAX with 0 <= MIN <= MAX and 1 <= MAX.
        """
        if self.scale is None:
            return 0, 0
        least, _, most = self.scale.partition(":")
        if not (least.isdecimal() and most.isdecimal() and int(least) <= int(most) >= 1):
            raise ValueError(
                f"scale is {self.scale!r}, but has to be MIN:MAX engines, as in 0:4, with MIN at "
                "most MAX and MAX at least 1"
            )
        return int(least), int(most)
