"""The floors of gllm's house: a package, called a room, imports those of lower floors alone.

tests/project/test_architecture.py holds the imports to it; docs/architecture.md has the table.
"""

from collections.abc import Mapping, Set
from types import MappingProxyType

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "options",
        "scheduler kernels",
        "routing pacing recovery messages observability",
        "config",
        "models text transport sim",
        "runtime plan",
        "engine",
        "router",
        "deploy",
        "frontend",
        "commands demo",
        "serve __main__",
    )
)
"""Rooms by floor, the lowest first. Rooms of one floor do not import each other. Above the highest
floor is only what is not part of the package: experiments/, benchmarks/, tests/."""

OUTSIDE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(packages.split())
        for name, packages in {
            "options": "yaml",
            "scheduler": "",
            "kernels": "flash_attn numpy torch triton",
            "routing": "",
            "routing.lengths": "msgspec numpy",
            "pacing": "",
            "recovery": "msgspec",
            "messages": "msgspec",
            "observability": "msgspec tqdm",
            "config": "",
            "models": "huggingface_hub numpy safetensors torch",
            "text": "jinja2 llguidance msgspec setproctitle tokenizers",
            "text.conversion": "tokenizers transformers",
            "transport": "msgspec torch",
            "transport.kv": "msgspec nixl numpy",
            "transport.link": "msgspec numpy setproctitle",
            "sim": "matplotlib msgspec numpy",
            "runtime.messaging": "cryptography zmq",
            "runtime.head": "msgspec zmq",
            "runtime.driver": "msgspec zmq",
            "runtime.node": "msgspec psutil pynvml zmq",
            "runtime.worker": "llguidance msgspec numpy setproctitle torch uvloop zmq",
            "plan": "msgspec numpy scipy",
            "engine": "msgspec tqdm",
            "router": "msgspec",
            "deploy": "prometheus_client",
            "deploy.cluster": "zmq",
            "deploy.ray": "msgspec ray setproctitle",
            "deploy.doctor": "zmq",
            "frontend": "aiohttp msgspec opentelemetry prometheus_client",
            "commands": "aiohttp matplotlib msgspec setproctitle uvloop",
            "commands.profile": "msgspec numpy torch",
            "serve": "uvloop",
            "__main__": "",
        }.items()
    }
)
"""By room, or part of one: the packages of other projects that it may import. The longest name that
fits a module counts."""


def room_of(module: str) -> str:
    """Return the room of one of gllm's modules: the package or module below `gllm`."""
    return module.split(".")[1] if "." in module else ""


def floor_of(room: str) -> int:
    """Return the number of a room's floor. Raises KeyError for a room that has none."""
    for number, rooms in enumerate(FLOORS, start=1):
        if room in rooms:
            return number
    raise KeyError(f"{room}: give this room a floor in scripts/rooms.py")


def forbidden(module: str, imported: Set[str]) -> set[str]:
    """Return the modules and packages that a module imports but may not.

    Args:
        module: Dotted name of a module of gllm.
        imported: Dotted names of what it imports, without the standard library.
    """
    own = room_of(module)
    parts = module.split(".")[1:]
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    packages = next((OUTSIDE[prefix] for prefix in prefixes if prefix in OUTSIDE), frozenset())

    def is_allowed(other: str) -> bool:
        top, _, _ = other.partition(".")
        if top != "gllm":
            return top in packages
        room = room_of(other)
        return room == own or (room != "" and floor_of(room) < floor_of(own))

    return {other for other in imported if not is_allowed(other)}


def floors_table() -> str:
    """Return the floors as a table in Markdown, the highest first."""
    rows = ["| floor | rooms | packages of other projects |", "| --: | --- | --- |"]
    for number, rooms in reversed(list(enumerate(FLOORS, start=1))):
        names = ", ".join(f"`{room}`" for room in sorted(rooms))
        parts = [name for name in OUTSIDE if name.split(".")[0] in rooms]
        packages = sorted(frozenset().union(*(OUTSIDE[name] for name in parts)))
        rows.append(f"| {number} | {names} | {', '.join(packages)} |")
    return "\n".join(rows) + "\n"
