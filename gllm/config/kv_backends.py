"""Names of the backends that move KV caches, for configurations; no backend is imported here."""

from types import MappingProxyType

AUTO = "auto"
"""Shared memory between processes of one machine, TCP between machines."""
MOCK = "mock:"
"""Begin of the name of a backend with a simulated bandwidth, in gigabytes per second."""
BACKENDS = MappingProxyType(
    {
        "shm": ("gllm.transport.kv.backends.shm", "ShmBackend"),
        "tcp": ("gllm.transport.kv.backends.tcp", "TcpBackend"),
        "nixl": ("gllm.transport.kv.backends.nixl", "NixlBackend"),
    }
)
"""Module and class by name, imported on first use."""

NIXL = "nixl"
NIXL_MISSING = (
    "the KV transfer backend nixl needs the package nixl: pip install nixl, or choose "
    "--kv-transfer tcp"
)
"""Error for an engine with this backend where its library is not installed."""


def check_backend_name(name: str) -> None:
    """Raise ValueError unless a name is a known KV transfer backend.

    Args:
        name: auto, shm, tcp, nixl, or mock:GIGABYTES_PER_SECOND for a simulated bandwidth.
    """
    if name != AUTO and name not in BACKENDS and not name.startswith(MOCK):
        names = ", ".join((AUTO, *BACKENDS))
        raise ValueError(f"{name!r} is none of {names} and {MOCK}GIGABYTES_PER_SECOND")
    if name.startswith(MOCK):
        parse_mock_rate(name)


def served_backend(name: str) -> str:
    """Return the backend that serves a fetch by a backend: only the receiver imitates a bandwidth.

    Raises:
        ValueError: There is no such backend.
    """
    check_backend_name(name)
    return "shm" if name.startswith(MOCK) else name


def scale_mock_rate(name: str, factor: float) -> str:
    """Return the name of a backend `mock:GIGABYTES_PER_SECOND` with another bandwidth."""
    return f"{MOCK}{parse_mock_rate(name) / 1e9 * factor}"


def parse_mock_rate(name: str) -> float:
    """Parse the simulated bandwidth of a backend `mock:GIGABYTES_PER_SECOND`.

    Returns:
        Bytes per second.

    Raises:
        ValueError: The bandwidth is not a positive number.
    """
    try:
        rate = 1e9 * float(name.removeprefix(MOCK))
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"{name!r}: expected a positive number of GB per second after {MOCK}")
    return rate
