"""Tickets: permissions to read the KV blocks of one sequence of an engine."""

import secrets
from typing import Annotated

from msgspec import Meta

MAX_TICKET = 2**63 - 1
Ticket = Annotated[int, Meta(ge=1, le=MAX_TICKET)]
"""Random number; a ticket is used for one submission, and by one receiver."""


def make_ticket() -> int:
    """Return a ticket that nobody can guess; never 0."""
    return secrets.randbelow(MAX_TICKET) + 1
