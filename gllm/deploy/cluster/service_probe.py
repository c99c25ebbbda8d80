"""Readings of a service's engine, by HTTP on the node of its head."""

from typing import Any
from urllib.parse import quote

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gllm.messages.services import PeerLink, ServiceReading

PREFIX = "gllm:"
TIMEOUT_SECONDS = 5.0
GOOD_REASONS = ("stop", "length")
"""Finish reasons of requests that ended well."""


class ServiceProbe:
    """Reads health, metrics and links of an engine."""

    def __init__(self, url: str, api_key: str) -> None:
        """Create a probe; `close` ends its connections.

        Args:
            url: of the engine's API.
            api_key: that the API requires.
        """
        self._url = url
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        )

    async def read(self) -> ServiceReading:
        """Return the state and the counters; an engine that does not answer is unreachable."""
        try:
            state, cause = await self._read_state()
            if state in ("loading", "dead"):
                return ServiceReading(state, cause)
            async with self._session.get(f"{self._url}/metrics") as answer:
                text = await answer.text()
            return parse_reading(state, cause, text, await self._read_links())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as error:
            return ServiceReading("unreachable", str(error) or type(error).__name__)

    async def drain_node(self, name: str) -> str:
        """Let a node leave the engine; return the reason for which it may not, empty for none."""
        url = f"{self._url}/nodes/{quote(name, safe='')}/drain"
        try:
            async with self._session.post(url) as answer:
                return (
                    "" if answer.status == 200 else str((await answer.json())["error"]["message"])
                )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as error:
            return str(error) or type(error).__name__

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _read_state(self) -> tuple[str, str]:
        """Return the state of the engine and its cause."""
        async with self._session.get(f"{self._url}/health") as answer:
            body = await answer.json()
        if answer.status == 200:
            return str(body["state"]), ""
        error = body["error"]
        return str(error["code"]).removeprefix("engine_"), str(error["message"])

    async def _read_links(self) -> list[PeerLink]:
        """Return the measured links between the nodes of the engine."""
        async with self._session.get(f"{self._url}/nodes") as answer:
            return parse_links(await answer.json()) if answer.status == 200 else []


def parse_reading(state: str, cause: str, metrics: str, links: list[PeerLink]) -> ServiceReading:
    """Return the reading of an engine from its metrics in Prometheus's text format.

    Raises:
        ValueError: the text cannot be parsed.
    """
    values: dict[str, float] = {}
    finished = failed = 0.0
    stages: dict[int, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name == "request_success_total":
                if sample.labels.get("finished_reason") in GOOD_REASONS:
                    finished += sample.value
                else:
                    failed += sample.value
            elif name == "stage_busy_seconds_total":
                stages[int(sample.labels["stage"])] = sample.value
            elif "le" not in sample.labels:
                values[name] = values.get(name, 0.0) + sample.value
    return ServiceReading(
        state,
        cause,
        int(values.get("num_requests_running", 0)),
        int(values.get("num_requests_waiting", 0)),
        int(finished),
        int(failed),
        int(values.get("prompt_tokens_total", 0)),
        int(values.get("generation_tokens_total", 0)),
        values.get("kv_cache_usage_perc", 0.0),
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
    return [each for each in links if each.bytes_per_second or each.round_trip_seconds]
