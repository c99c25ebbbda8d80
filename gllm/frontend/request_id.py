"""Ids of requests: from the client's header, or random."""

import re
import uuid

from gllm.observability.logs import LOG_REQUEST_ID

MAX_ID_CHARACTERS = 128
"""Maximum length of a client's id."""


def request_id(header: str) -> str:
    """Return the id in an X-Request-Id header, without special characters; if empty, a new id."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", header)[:MAX_ID_CHARACTERS] or uuid.uuid4().hex


def current_request_id() -> str:
    """Return the id of the HTTP request that the current asyncio task handles; else a new id."""
    return LOG_REQUEST_ID.get() or request_id("")
