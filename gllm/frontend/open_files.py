"""How many connections this process may have open.

Owns the raising of the system's limit on open files, of which every connection is one.
"""

import logging
import resource

log = logging.getLogger(__name__)


def raise_open_files_limit() -> None:
    """Raise the soft limit of this process to the hard one.

    A process that may have few files open cannot accept connections beyond, and cannot answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems name a hard limit that they refuse
        log.warning("the limit on open files stays at %d: %s", soft, error)
