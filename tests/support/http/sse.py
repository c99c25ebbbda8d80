"""Reading server-sent events as strictly as a client may."""

import json
from typing import Any


def events_of(body: bytes) -> list[Any]:
    """The JSON of each event; the last one has to be `[DONE]`."""
    assert body.endswith(b"\n\n")
    blocks = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts[-1] == "[DONE]"
    assert texts.count("[DONE]") == 1
    return [json.loads(text) for text in texts[:-1]]


def named_events_of(body: bytes) -> list[Any]:
    """The JSON of each event, whose name has to be its type; the last one is an event as well."""
    assert body.endswith(b"\n\n")
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
