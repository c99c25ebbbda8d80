"""The id of a request, and where log lines find it.

Owns what an id may look like. Knows nothing of answers.
"""

import re
import uuid
from contextvars import ContextVar

MAX_LENGTH = 128

CURRENT: ContextVar[str] = ContextVar("request_id")
"""The id of the request that this task works for."""


def request_id(given: str) -> str:
    """The client's id without odd characters, or a new one where that leaves nothing."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:MAX_LENGTH] or uuid.uuid4().hex


def current_id() -> str:
    """The id of the request that this task works for, made up where it has none."""
    return CURRENT.get("") or request_id("")
