"""Registry of backends: a backend is one file and one line of BACKENDS."""

import importlib

from gllm.config.kv_backends import BACKENDS, MOCK, check_backend_name, parse_mock_rate
from gllm.transport.kv.backends.base import KvBackend


def make_backend(name: str) -> KvBackend:
    """Return a backend.

    Args:
        name: Of BACKENDS, or mock:GIGABYTES_PER_SECOND.

    Raises:
        ValueError: There is no such backend.
        ImportError: A library that it needs is missing.
    """
    check_backend_name(name)
    if name.startswith(MOCK):
        from gllm.transport.kv.backends.mock import MockBackend

        return MockBackend(make_backend("shm"), parse_mock_rate(name))
    module, class_name = BACKENDS[name]
    backend: KvBackend = getattr(importlib.import_module(module), class_name)()
    return backend
