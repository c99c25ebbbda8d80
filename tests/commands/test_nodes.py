"""`gllm nodes`: the table of an engine's machines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gllm.__main__ import main
from gllm.commands.nodes import render_links, render_table
from tests.support.http.handler_server import QuietHandler, serving_handler

NODE: dict[str, Any] = {
    "name": "head",
    "rank": 0,
    "state": "member",
    "stages": [0, 1],
    "devices": ["H200", "H200", "A100"],
    "load": {
        "cpu_utilization": 0.5,
        "memory_available_bytes": 3 * 2**29,
        "gpu_utilization": [0.25, None],
        "power_watts": 150.4,
        "temperature_celsius": 60.0,
    },
    "round_trip_seconds": 0.0021,
    "clock_offset_seconds": -1.5,
    "links": [
        {
            "transport": "tcp+tls", "is_open": True, "num_bytes": 2**20, "cause": "",
            "peer": "b", "edge": 3, "is_sender": True, "policy": "molink", "num_failures": 2,
            "bytes_per_second": 1.2e7, "round_trip_seconds": 0.0602, "loss_rate": 0.012,
            "num_queued_bytes": 3 * 2**19, "last_chunk_bytes": 2**14,
        },
        {"transport": "tcp+tls", "is_open": False, "num_bytes": 0, "cause": "refused"},
    ],
    "last_cause": "",
}  # fmt: skip
LOST: dict[str, Any] = {
    "name": "b", "rank": None, "state": "lost", "stages": [], "devices": [],
    "load": {
        "cpu_utilization": None, "memory_available_bytes": None, "gpu_utilization": [],
        "power_watts": None, "temperature_celsius": None,
    },
    "round_trip_seconds": None, "clock_offset_seconds": None, "links": [],
    "last_cause": "no heartbeat for 5 s",
}  # fmt: skip


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Serve one answer, and keep the last key in the answers' headers."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            good = self.path == "/nodes" and self.headers["Authorization"] in (None, "Bearer k")
            self.send_response(status if good else 400)
            self.end_headers()
            self.wfile.write(body)

    with serving_handler(Handler) as url:
        yield url


def test_table():
    heading, head, lost = render_table([NODE, LOST])
    assert heading.startswith("name  rank  state   stages")
    for cell in (
        "head", "0,1", "2 x H200, 1 x A100", "50%", "25%,-", "1.5 GiB", "150 W", "60 °C", "2.1 ms",
        "-1.500 s", "1/2 tcp+tls 1.0 MiB (refused)",
    ):  # fmt: skip
        assert cell in head
    assert head.index("member") == heading.index("state") == lost.index("lost")
    assert lost.endswith("no heartbeat for 5 s")
    assert "CPU" in lost


def test_table_of_links():
    heading, link = render_links([NODE, LOST])
    assert heading.split("  ")[0] == "link from"
    assert [cell.strip() for cell in link.split("  ") if cell] == [
        "head", "b", "3", "molink", "96.0 Mbit/s", "60.2 ms", "1.2%", "1536.0 KiB", "16.0 KiB", "2",
    ]  # fmt: skip
    assert render_links([LOST]) == []


def test_table_of_a_server(capsys):
    body = {"nodes": [NODE, LOST], "refused_peers": {"10.0.0.7": 3}, "num_node_losses": 1}
    with answering(200, json.dumps(body).encode()) as url:
        assert main(["nodes", url + "/v1", "--api-key", "k"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 8
        assert lines[-1] == "refused connections: 10.0.0.7 (3)"
        assert main(["nodes", "--json", url]) == 0
        assert json.loads(capsys.readouterr().out) == body


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"{}", "needs an API key"),
        (404, b'{"error": {"message": "This is a router."}}', "404: This is a router."),
        (500, b"oops", "returned 500"),
        (200, b"[]", "is no server of gllm"),
        (200, b"oops", "cannot read"),
    ],
)
def test_errors_of_a_server(status, body, reason, capsys):
    with answering(status, body) as url:
        assert main(["nodes", url]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("gllm nodes: ")
    assert len(error.splitlines()) == 1


def test_server_that_is_not_there(capsys):
    with answering(200, b"") as url:
        pass
    assert main(["nodes", url]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["nodes", url, "--api-key", "ä"]) == 2
