"""Latency objectives and session of a request, read from its body and headers.

Routers choose engines by them, and engines learn when a session returns.

The headers are those of llm-d, AIBrix and Dynamo, whose clients and gateways send them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from gllm.frontend.fields.generation import SamplingFields
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_SESSION_CHARACTERS
from gllm.options.slo import Slo

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Headers with the objective of the time to the first token in milliseconds; the first wins."""
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""The same for the time per output token."""
SLO_HEADERS = (*TTFT_HEADERS, *TPOT_HEADERS)
SESSION_HEADERS = ("x-session-token", "x-session-id", "X-Dynamo-Session-ID")
"""Headers with the session of a request; the first that is present is used."""


class RoutingHints(NamedTuple):
    """Latency objectives, session and client of a request."""

    slo: Slo | None
    """Limits of time to first token and time per output token; None if there are none."""
    session: str
    """Name of the session, whose requests go to the same engine if possible; empty: none."""
    client: str = ""
    """Name of the client, such as the number of its API key; empty without keys."""


NO_HINTS = RoutingHints(None, "")
"""Hints of a request without hints, on a server without an objective."""


def read_routing_hints(
    headers: Mapping[str, str], fields: SamplingFields, default_slo: Slo, client: str = ""
) -> RoutingHints:
    """Return a request's latency objectives and session, from its body or else its headers.

    Args:
        headers: The request's headers; the mapping ignores case.
        fields: The parsed request body.
        default_slo: Latency objectives for requests that have none.
        client: Name of the client.

    Raises:
        FieldError: A header is not a positive number of milliseconds; the error names the header.
    """
    slo = Slo(fields.slo_ttft, fields.slo_tpot)
    if any(name in headers for name in SLO_HEADERS):
        ttft, tpot = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS)
        slo = slo.with_defaults(Slo(ttft, tpot))
    if default_slo:
        slo = slo.with_defaults(default_slo)
    session = fields.prompt_cache_key or ""
    if not session and any(name in headers for name in SESSION_HEADERS):
        # Headers may have bytes that are not UTF-8.
        session = _first(headers, SESSION_HEADERS)[1].encode(errors="replace").decode()
    return RoutingHints(slo or None, session[:MAX_SESSION_CHARACTERS], client)


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Return the first header that is present and not empty, and its value; else empty strings."""
    values = ((name, headers.get(name, "").strip()) for name in names)
    return next((pair for pair in values if pair[1]), ("", ""))


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    """Return the milliseconds of the first of some headers as seconds; None without one."""
    name, text = _first(headers, names)
    if not name:
        return None
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise FieldError(name, f"{name} is {text[:200]!r}, but has to be milliseconds above 0")
    return seconds
