"""The id of a request, and where log lines find it.

Owns what an id may look like. Knows nothing of answers.
"""

import re
import uuid

from gllm.observability.logs import LOG_REQUEST_ID

MAX_ID_CHARACTERS = 128


def request_id(given: str) -> str:
    """The client's id without odd characters, or a new one where that leaves nothing."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:MAX_ID_CHARACTERS] or uuid.uuid4().hex


def current_request_id() -> str:
    """The id of the request that this task works for, made up where it has none."""
    return LOG_REQUEST_ID.get() or request_id("")
