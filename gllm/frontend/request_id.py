"""The id of a request, and where log lines find it.

Owns what an id may look like. Knows nothing of answers.
"""

import re
import uuid

from gllm.observability.logs import REQUEST_ID

MAX_LENGTH = 128


def request_id(given: str) -> str:
    """The client's id without odd characters, or a new one where that leaves nothing."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:MAX_LENGTH] or uuid.uuid4().hex


def current_id() -> str:
    """The id of the request that this task works for, made up where it has none."""
    return REQUEST_ID.get() or request_id("")
