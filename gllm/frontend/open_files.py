"""Raise the limit on open files, because every connection is an open file."""

import logging
import resource

log = logging.getLogger(__name__)


def raise_open_files_limit() -> None:
    """Raise the soft limit of this process to the hard one.

    Above the limit a process cannot accept connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems refuse their own hard limit
        log.warning("the limit on open files stays at %d: %s", soft, error)
