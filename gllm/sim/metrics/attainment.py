"""SLO attainment of a run by class of requests."""

import math
from collections.abc import Mapping
from typing import Any

from gllm.observability.latency import slo_attainment
from gllm.options.slo import NO_SLO, Slo
from gllm.sim.metrics.run_record import ServedRequest


def parse_slo_limits(text: str) -> dict[str, Slo]:
    """Return the limits of each class of a text such as `chat:0.5:0.05,batch:30:`.

    Each class has the limits of TTFT and TPOT in seconds; an empty one is no limit of the class.

    Raises:
        ValueError: A class lacks a name, occurs twice, or has a limit that is no number above 0.
    """
    limits: dict[str, Slo] = {}
    for part in text.split(","):
        name, *numbers = (word.strip() for word in part.split(":"))
        try:
            values = [float(number) if number else None for number in numbers]
        except ValueError:
            values = [math.nan]
        is_valid = all(value is None or 0 < value < math.inf for value in values)
        if not name or name in limits or len(values) != 2 or not is_valid:
            raise ValueError(
                f"--slo-limits {text}: {part!r} has to be NAME:TTFT:TPOT with limits in seconds, "
                "each name once, as in chat:0.5:0.05,batch:30:"
            )
        limits[name] = Slo(*values)
    return limits


def class_attainment(
    requests: Mapping[int, ServedRequest],
    classes: Mapping[int, str],
    limits: Mapping[str, Slo],
    default: Slo = NO_SLO,
) -> dict[str, dict[str, Any]]:
    """Return the number of requests and the SLO attainment (0..1) of each class.

    Args:
        requests: Requests of a run by sequence.
        classes: Class of each sequence; without one, a request belongs to no class.
        limits: Limits of the classes.
        default: Limits where a class has none.
    """
    members: dict[str, list[ServedRequest]] = {}
    for seq, served in requests.items():
        if name := classes.get(seq):
            members.setdefault(name, []).append(served)
    attainment: dict[str, dict[str, Any]] = {}
    for name, served_requests in sorted(members.items()):
        slo = limits.get(name, NO_SLO).with_defaults(default)
        attainment[name] = {
            "requests": len(served_requests),
            "slo_ttft": slo.ttft_seconds,
            "slo_tpot": slo.tpot_seconds,
            "slo_attainment": slo_attainment((each.line for each in served_requests), *slo),
        }
    return attainment
