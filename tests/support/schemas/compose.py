"""JSON Schema of the parts of compose files that gllm writes.

Written from the documented fields of the Compose Specification (compose-spec.io).
"""

from typing import Any

_SECONDS = {"type": "string", "pattern": "^[0-9]+s$"}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_DEVICES = {
    "type": "object",
    "additionalProperties": False,
    "required": ["capabilities"],
    "properties": {"driver": {"type": "string"}, "device_ids": _TEXTS, "capabilities": _TEXTS},
}


def _only(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


_SERVICE = _only(
    image={"type": "string"},
    command=_TEXTS,
    network_mode={"enum": ["host"]},
    ipc={"enum": ["private", "host", "shareable"]},
    shm_size={"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    stop_grace_period=_SECONDS,
    healthcheck=_only(test=_TEXTS, interval=_SECONDS, timeout=_SECONDS, start_period=_SECONDS),
    secrets=_TEXTS,
    deploy=_only(resources=_only(reservations=_only(devices={"type": "array", "items": _DEVICES}))),
)
COMPOSE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_only(
        services={
            "type": "object",
            "patternProperties": {"^[a-zA-Z0-9._-]+$": _SERVICE},
            "additionalProperties": False,
        },
        secrets={"type": "object", "additionalProperties": _only(file={"type": "string"})},
    ),
    "required": ["services"],
}
