"""Exit statuses: those after which a manager starts a process again, and those of no help."""

import errno
import os
import socket

import pytest
import zmq

from gllm.models.errors import ModelError
from gllm.models.hub_download import ModelUnreachableError
from gllm.options.exit_status import INVALID_STATUS, UNAVAILABLE_STATUS, find_exit_status


def raised_from(cause: Exception) -> Exception:
    """Return an error that names a flag, raised from a cause, with another one between."""
    try:
        try:
            raise OSError("the hub cannot listen") from cause
        except OSError as error:
            raise ValueError("--hub: choose another one") from error
    except ValueError as error:
        return error


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


PASSING = [
    os_error(errno.EADDRINUSE),
    os_error(errno.EADDRNOTAVAIL),
    os_error(errno.ENETUNREACH),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    zmq.ZMQError(errno.EADDRINUSE),
    ModelUnreachableError("huggingface.co cannot be reached"),
]
LASTING = [
    ValueError("unknown flag"),
    ModelError("its architecture is not supported"),
    os_error(errno.ENOENT),
    os_error(errno.EACCES),
    OSError("no number"),
]


@pytest.mark.parametrize("cause", PASSING, ids=repr)
def test_causes_that_pass_are_worth_a_restart(cause: Exception) -> None:
    assert find_exit_status(cause) == find_exit_status(raised_from(cause)) == UNAVAILABLE_STATUS


@pytest.mark.parametrize("cause", LASTING, ids=repr)
def test_causes_that_last_are_not(cause: Exception) -> None:
    assert find_exit_status(cause) == find_exit_status(raised_from(cause)) == INVALID_STATUS
