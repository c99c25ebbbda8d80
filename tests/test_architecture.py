"""The rooms' walls: who imports whom, what loads torch, how modules look."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path
    for path in (ROOT / "gllm").rglob("*.py")
    if path.stat().st_size and "demo" not in path.parts
)
STANDARD = sys.stdlib_module_names

ALLOWED: dict[str, set[str]] = {
    "gllm.options": set(),
    "gllm.field_types": {"gllm.options"},
    "gllm.scheduler": {"gllm.field_types", "gllm.options", "gllm.scheduler"},
    "gllm.metrics": set(),
    "gllm.logs": set(),
    "gllm.bubbles": {"gllm.scheduler"},
    "gllm.limits": {"gllm.field_types"},
    "gllm.config": {
        *("gllm.field_types", "gllm.flags", "gllm.limits", "gllm.logs", "gllm.options"),
        "gllm.scheduler",
    },
    "gllm.flags": {"gllm.options", "yaml"},
    "gllm.messages": {"gllm.scheduler", "msgspec"},
    "gllm.step_log": {"gllm.scheduler", "msgspec"},
    "gllm.sim": {
        *("gllm.bubbles", "gllm.config", "gllm.field_types", "gllm.flags", "gllm.metrics"),
        *("gllm.options", "gllm.scheduler", "gllm.sim", "gllm.step_log"),
        *("matplotlib", "msgspec", "numpy", "sklearn", "tqdm"),
    },
    "gllm.kernels": {"flash_attn", "gllm.kernels", "numpy", "torch", "triton"},
    "gllm.models": {
        "gllm.config",
        "gllm.models",
        "gllm.kernels",
        "numpy",
        "torch",
        "safetensors",
        "huggingface_hub",
    },
    "gllm.streams": {"torch"},
    "gllm.transport": {"gllm.streams", "gllm.transport", "torch", "msgspec"},
    "gllm.text": {"gllm.text", "gllm.config", "gllm.limits", "jinja2", "msgspec", "tokenizers"},
    "gllm.grammar": {"gllm.config", "gllm.grammar", "llguidance", "setproctitle"},
    "gllm.engine_api": {
        *("gllm.config", "gllm.field_types", "gllm.limits", "gllm.messages", "gllm.scheduler"),
        *("gllm.text", "msgspec"),
    },
    "gllm.runtime": {
        *("gllm.config", "gllm.messages", "gllm.scheduler", "gllm.kernels", "gllm.models"),
        *("gllm.transport", "gllm.runtime", "gllm.step_log", "gllm.streams", "gllm.bubbles"),
        *("gllm.grammar", "gllm.limits", "llguidance"),
        *("gllm.logs", "msgspec", "numpy", "setproctitle", "torch", "uvloop", "zmq"),
    },
    "gllm.preflight": {"gllm.config", "gllm.flags", "gllm.models"},
    "gllm.request": {
        *("gllm.config", "gllm.engine_api", "gllm.messages", "gllm.runtime", "gllm.scheduler"),
        "gllm.text",
    },
    "gllm.engine": {
        "gllm.models",
        *("gllm.config", "gllm.engine_api", "gllm.grammar", "gllm.logs", "gllm.messages"),
        "gllm.field_types",
        *(
            "gllm.preflight",
            "gllm.request",
            "gllm.runtime",
            "gllm.scheduler",
            "gllm.text",
            "msgspec",
            "tqdm",
        ),
    },
    "gllm.llm": {
        *("gllm.config", "gllm.engine", "gllm.engine_api", "gllm.field_types", "gllm.messages"),
        *("gllm.text", "tqdm"),
    },
    "gllm.frontend": {
        *("gllm", "gllm.config", "gllm.engine_api", "gllm.frontend", "gllm.grammar", "gllm.logs"),
        *("gllm.messages", "gllm.metrics", "gllm.text", "aiohttp", "msgspec", "opentelemetry"),
        *("gllm.limits", "prometheus_client"),
    },
    "gllm.server": {
        *("gllm.config", "gllm.engine", "gllm.frontend", "gllm.logs", "gllm.runtime", "aiohttp"),
    },
    "gllm.serve": {
        *(
            "gllm.flags",
            "gllm.preflight",
            "gllm",
            "gllm.config",
            "gllm.engine",
            "gllm.logs",
            "gllm.runtime",
            "gllm.server",
        ),
        *("setproctitle", "uvloop"),
    },
    "gllm.experiments": {
        *("gllm.config", "gllm.engine", "gllm.experiments", "gllm.models", "gllm.scheduler"),
        *("gllm.flags", "gllm.options", "gllm.sim", "gllm.step_log", "tqdm"),
    },
    "gllm.bench": {
        *(
            "gllm.flags",
            "gllm.bench",
            "gllm.config",
            "gllm.engine",
            "gllm.experiments",
            "gllm.field_types",
            "gllm.metrics",
            "gllm.options",
        ),
        *("gllm.scheduler", "gllm.sim", "aiohttp", "matplotlib", "msgspec", "tqdm", "uvloop"),
    },
    "gllm.chat": {"gllm.config", "gllm.flags", "gllm.options"},
    "gllm.top": {"gllm.config", "gllm.flags", "gllm.top", "prometheus_client"},
    "gllm.cli": {"gllm"},
}
"""By room: what may be imported besides the standard library."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in (ROOT / "gllm").rglob("*.py")}
"""All modules and packages of gllm."""


def imported(source: str, name: str = "gllm") -> set[str]:
    """Return the modules that a source imports when it runs, not those for type checkers alone.

    A name imported from a package counts as the module of that name if there is one.

    Args:
        source: Python code.
        name: The package that relative imports start from.
    """
    modules: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = name.split(".")[: len(name.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            members = {f"{origin}.{alias.name}" for alias in node.names}
            modules |= members & NAMES or {origin}
            if not members <= NAMES:
                modules.add(origin)
        nodes += ast.iter_child_nodes(node)
    return modules


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def room(name: str) -> str:
    """The layer of one of our modules; another package's first name."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "gllm" else parts[0]


def strangers(name: str, source: str) -> set[str]:
    """What a module imports and may not."""
    rooms = {room(other) for other in imported(source, name.rpartition(".")[0])}
    return {r for r in rooms if r not in STANDARD} - ALLOWED[room(name)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_stay_within_the_layers(path: Path) -> None:
    if name_of(path) != "gllm":
        assert strangers(name_of(path), path.read_text()) == set()


def test_the_check_finds_what_does_not_belong() -> None:
    assert strangers("gllm.scheduler.x", "import torch, json") == {"torch"}
    assert strangers("gllm.frontend.x", "def f():\n    from gllm.runtime.bus import Inbox") == {
        "gllm.runtime"
    }
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert strangers("gllm.transport.x", hidden) == set()


LIGHT = (
    *("gllm.scheduler.scheduler", "gllm.frontend.app", "gllm.engine", "gllm.server", "gllm.chat"),
    *("gllm.sim.deployment", "gllm.sim.report", "gllm.sim.workload", "gllm.bench.serve"),
)
HEAVY = {"torch", "transformers", "sklearn", "matplotlib", "opentelemetry"}


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, the first one again at the end; empty if none."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        cycles = (visit(other, [*above, name]) for other in sorted(graph.get(name, ())))
        cycle = next((cycle for cycle in cycles if cycle), [])
        done.add(name)
        return cycle

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def test_modules_import_without_cycles() -> None:
    graph = {
        name_of(path): imported(path.read_text(), package_of(path)) & NAMES for path in MODULES
    }
    assert find_cycle(graph) == []


def test_cycle_through_a_package_is_found() -> None:
    sources = {
        "gllm.models.config": "from gllm.models import registry",
        "gllm.models.registry": "from .keys import KEYS",
        "gllm.models.keys": "def f():\n    from . import config",
    }
    graph = {name: imported(source, "gllm.models") for name, source in sources.items()}
    assert find_cycle(graph) == [*sources, "gllm.models.config"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_what_they_own_and_stay_short(path: Path) -> None:
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 400
    assert not imported(source) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
