"""Registry of backends: a backend is one file and one line."""

import importlib
from types import MappingProxyType

from gllm.kv_transfer.backends.base import KvBackend

AUTO = "auto"
"""Shared memory between processes of one machine, TCP between machines."""
_MOCK = "mock:"
BACKENDS = MappingProxyType(
    {
        "shm": ("gllm.kv_transfer.backends.shm", "ShmBackend"),
        "tcp": ("gllm.kv_transfer.backends.tcp", "TcpBackend"),
        "nixl": ("gllm.kv_transfer.backends.nixl", "NixlBackend"),
    }
)
"""Module and class by name, imported on first use."""


def check_backend_name(name: str) -> None:
    """Raise ValueError unless `name` is AUTO, one of BACKENDS or mock:GIGABYTES_PER_SECOND."""
    if name != AUTO and name not in BACKENDS and not name.startswith(_MOCK):
        names = ", ".join((AUTO, *BACKENDS))
        raise ValueError(f"{name!r} is none of {names} and {_MOCK}GIGABYTES_PER_SECOND")
    if name.startswith(_MOCK):
        _parse_rate(name)


def make_backend(name: str) -> KvBackend:
    """Return a backend.

    Args:
        name: Of BACKENDS, or mock:GIGABYTES_PER_SECOND.

    Raises:
        ValueError: There is no such backend.
        ImportError: A library that it needs is missing.
    """
    check_backend_name(name)
    if name.startswith(_MOCK):
        from gllm.kv_transfer.backends.mock import MockBackend

        return MockBackend(make_backend("shm"), _parse_rate(name))
    module, class_name = BACKENDS[name]
    backend: KvBackend = getattr(importlib.import_module(module), class_name)()
    return backend


def _parse_rate(name: str) -> float:
    """Return the bytes per second of a mock backend. Raises ValueError."""
    try:
        rate = 1e9 * float(name.removeprefix(_MOCK))
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"{name!r}: expected a positive number of GB per second after {_MOCK}")
    return rate
