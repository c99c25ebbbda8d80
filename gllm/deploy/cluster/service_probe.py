"""Readings of a service's engine, by HTTP on the node of its head."""

from typing import Any
from urllib.parse import quote

from gllm.deploy.metrics_scrape import parse_metrics
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.messages.services import PeerLink, ServiceReading

GOOD_REASONS = ("stop", "length")
"""Finish reasons of requests that ended well."""


def read_engine(server: ServerClient) -> ServiceReading:
    """Return the state and the counters of an engine; one that does not answer is unreachable."""
    try:
        state, cause = _read_state(server)
        if state in ("loading", "dead"):
            return ServiceReading(state, cause)
        return parse_reading(state, cause, server.get_text("/metrics"), _read_links(server))
    except (ServerError, ValueError, LookupError) as error:
        return ServiceReading("unreachable", str(error))


def drain_node(server: ServerClient, name: str) -> str:
    """Let a node leave an engine; return the reason for which it may not, empty for none."""
    try:
        server.post(f"/nodes/{quote(name, safe='')}/drain")
    except ServerError as error:
        return error.reason or str(error)
    return ""


def _read_state(server: ServerClient) -> tuple[str, str]:
    """Return the state of an engine and its cause. Raises ServerError without an answer."""
    try:
        return str(server.get("/health")["state"]), ""
    except ServerError as error:
        if not error.code:
            raise
        return error.code.removeprefix("engine_"), error.reason


def _read_links(server: ServerClient) -> list[PeerLink]:
    """Return the measured links between the nodes of an engine; none if it is on one node."""
    try:
        return parse_links(server.get("/nodes"))
    except ServerError:
        return []


def parse_reading(state: str, cause: str, metrics: str, links: list[PeerLink]) -> ServiceReading:
    """Return the reading of an engine from its metrics in Prometheus's text format.

    Raises:
        ValueError: the text cannot be parsed.
    """
    scrape = parse_metrics(metrics, 0.0)
    num_good = sum(scrape.finished.get(reason, 0.0) for reason in GOOD_REASONS)
    stages = scrape.stages.get("stage_busy_seconds_total", {})
    return ServiceReading(
        state,
        cause,
        int(scrape.value("num_requests_running")),
        int(scrape.value("num_requests_waiting")),
        int(num_good),
        int(sum(scrape.finished.values()) - num_good),
        int(scrape.value("prompt_tokens_total")),
        int(scrape.value("generation_tokens_total")),
        scrape.value("kv_cache_usage_perc"),
        [stages[stage] for stage in sorted(stages)],
        links,
    )


def parse_links(nodes: dict[str, Any]) -> list[PeerLink]:
    """Return the links of GET /nodes whose rate or round trip was measured."""
    links = [
        PeerLink(
            row["name"], link["peer"], link.get("bytes_per_second"), link.get("round_trip_seconds")
        )
        for row in nodes["nodes"]
        for link in row["links"]
    ]
    return [link for link in links if link.bytes_per_second or link.round_trip_seconds]
