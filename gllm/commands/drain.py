"""`gllm drain NODE [URL]`: take a machine out of a running engine, without failing a request."""

import argparse
import sys
import time
from urllib.parse import quote

from gllm.commands.nodes import read_nodes
from gllm.commands.server_command import add_server_flags, make_client, report_failure
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.options.flags import FlagParser

POLL_SECONDS = 0.2
"""Interval at which the machine's state is read."""
RETRY_STATUS = 503
"""Status code of an engine that is not ready yet."""


def drain(client: ServerClient, node: str, timeout: float) -> str:
    """Drain a node of a multi-node engine, and wait until the node has left the engine.

    Args:
        client: HTTP client of the engine's server.
        node: name of the node.
        timeout: seconds to wait, also for an engine that is recovering.

    Returns:
        The reason why the node is not drained; empty if it is.

    Raises:
        ServerError: the server cannot be reached, or refuses.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            client.post(f"/nodes/{quote(node, safe='')}/drain")
            break
        except ServerError as error:
            if error.status != RETRY_STATUS or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)
    while time.monotonic() < deadline:
        rows = {row["name"]: row for row in read_nodes(client)["nodes"]}
        if node not in rows:
            return ""
        row = rows[node]
        if row["state"] != "draining":
            return f"it is {row['state']}: {row['last_cause'] or 'the reason is not known'}"
        time.sleep(POLL_SECONDS)
    return f"it still drains after {timeout:g} seconds"


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm drain`."""
    parser = FlagParser(
        prog="gllm drain",
        description="Take a machine out of a running engine: its layers move to other machines, "
        "requests go on, and its `gllm node` ends with status 0.",
    )
    parser.add_argument("node", help="name of the machine, as in `gllm nodes`")
    add_server_flags(parser, "url")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds to wait until the machine has left (default 600)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Remove a node from a running engine, whose other nodes take over its layers.

    Returns:
        The exit status: 1 if the node is not drained.
    """
    arguments = make_parser().parse_args(argv)
    try:
        reason = drain(make_client(arguments), arguments.node, arguments.timeout)
    except (ServerError, ValueError) as error:
        return report_failure("drain", error)
    if reason:
        print(f"gllm drain: {arguments.node} is not drained: {reason}", file=sys.stderr)
        return 1
    print(f"{arguments.node} has left the engine")
    return 0
