"""`gllm nodes [URL]`: list the machines of a running engine."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gllm.commands.server_command import add_server_flags, make_client, report_failure
from gllm.config.nodes import BYTES_PER_MBIT
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.options.flags import FlagParser

UNKNOWN = "-"
"""Cell of a value that is not known."""
COLUMNS = (
    "name", "rank", "state", "stages", "devices", "cpu", "gpu", "memory", "power", "temp",
    "round trip", "clock", "links", "last cause",
)  # fmt: skip
LINK_COLUMNS = (
    "link from", "to", "edge", "policy", "rate", "round trip", "loss", "queued", "chunk",
    "failures",
)  # fmt: skip
"""Columns of the connections that send activations."""


def read_nodes(client: ServerClient) -> dict[str, Any]:
    """Return the server's JSON response to GET /nodes: the nodes of an engine and their links.

    Raises:
        ServerError: the server cannot be reached, or refuses.
    """
    answer = client.get("/nodes")
    if not isinstance(answer, dict) or not isinstance(answer.get("nodes"), list):
        raise ServerError(f"{client.url} is no server of gllm, or an older one")
    return answer


def render_table(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the nodes of a GET /nodes response as lines of a table with a heading."""
    return _align([COLUMNS, *(_cells(node) for node in nodes)])


def render_links(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the connections between nodes that carry activations; empty without any."""
    rows = [
        _link_cells(node["name"], link)
        for node in nodes
        for link in node["links"]
        if link.get("is_sender")
    ]
    return _align([LINK_COLUMNS, *rows]) if rows else []


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equal length as lines with aligned columns."""
    # The last column is not padded, because causes are long.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join(
            [*(f"{cell:{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def _link_cells(name: str, link: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        link["peer"],
        str(link["edge"]),
        link["policy"],
        _number(link["bytes_per_second"], "{:.1f} Mbit/s", BYTES_PER_MBIT),
        _number(link["round_trip_seconds"], "{:.1f} ms", 1e-3),
        f"{link['loss_rate']:.1%}",
        _number(link["num_queued_bytes"], "{:.1f} KiB", 2**10),
        _number(link["last_chunk_bytes"], "{:.1f} KiB", 2**10),
        str(link["num_failures"]),
    )


def _cells(node: Mapping[str, Any]) -> tuple[str, ...]:
    load, links = node["load"], node["links"]
    gpus = [_percent(share) for share in load["gpu_utilization"]]
    devices = node["devices"]
    return (
        node["name"],
        _number(node["rank"], "{}"),
        node["state"],
        ",".join(map(str, node["stages"])) or UNKNOWN,
        _devices(devices),
        _percent(load["cpu_utilization"]),
        ",".join(gpus) or UNKNOWN,
        _number(load["memory_available_bytes"], "{:.1f} GiB", 2**30),
        _number(load["power_watts"], "{:.0f} W"),
        _number(load["temperature_celsius"], "{:.0f} °C"),
        _number(node["round_trip_seconds"], "{:.1f} ms", 1e-3),
        _number(node["clock_offset_seconds"], "{:+.3f} s"),
        _links(links),
        node["last_cause"] or UNKNOWN,
    )


def _devices(names: Sequence[str]) -> str:
    if not names:
        return "CPU"
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _links(links: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of open connections and their bytes, and the cause of a closed one."""
    if not links:
        return UNKNOWN
    num_open = sum(link["is_open"] for link in links)
    num_bytes = sum(link["num_bytes"] for link in links)
    transports = "/".join(sorted({link["transport"] for link in links}))
    text = f"{num_open}/{len(links)} {transports} {num_bytes / 2**20:.1f} MiB"
    cause = next((link["cause"] for link in links if not link["is_open"] and link["cause"]), "")
    return f"{text} ({cause})" if cause else text


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    if value is None:
        return UNKNOWN
    return form.format(value if unit == 1 else value / unit)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm nodes`."""
    parser = FlagParser(prog="gllm nodes", description="List the machines of a running engine.")
    add_server_flags(parser, "url")
    parser.add_argument("--json", action="store_true", help="print the answer of /nodes as it is")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the nodes of a running engine and the connections between them.

    Returns:
        The exit status: 1 if the server returns no list.
    """
    arguments = make_parser().parse_args(argv)
    try:
        answer = read_nodes(make_client(arguments))
    except (ServerError, ValueError) as error:
        return report_failure("nodes", error)
    if arguments.json:
        print(json.dumps(answer, indent=1))
        return 0
    print("\n".join(render_table(answer["nodes"])))
    if links := render_links(answer["nodes"]):
        print("\n" + "\n".join(links))
    if refused := answer.get("refused_peers"):
        addresses = ", ".join(f"{address} ({count})" for address, count in refused.items())
        print(f"\nrefused connections: {addresses}")
    return 0
