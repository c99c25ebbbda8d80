"""The rooms' walls: who imports whom, what loads torch, how modules look."""

import ast
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path

import pytest

from gllm.kernels.attention_backends import BACKENDS
from scripts.architecture_page import PAGE, with_current_parts
from scripts.rooms import FLOORS, forbidden, room_of
from tests.support.sources import ROOT, parse, sources, text_of

MODULES = [path for path in sources("gllm") if path.stat().st_size and "demo" not in path.parts]
STANDARD = sys.stdlib_module_names


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in sources("gllm")}
"""All modules and packages of gllm."""


@cache
def imported(source: str, name: str = "gllm", with_types: bool = False) -> frozenset[str]:
    """Return the modules that a source imports, at the top or within functions.

    A name imported from a package counts as the module of that name if there is one.

    Args:
        source: Python code.
        name: The package that relative imports start from.
        with_types: Also return what is imported for type checkers alone.
    """
    modules: set[str] = set()
    # Imports are statements, so expressions are not searched.
    nodes: list[ast.AST] = [parse(source)]
    while nodes:
        node = nodes.pop()
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if for_types and not with_types:
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
        nodes += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return frozenset(modules)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def forbidden_imports(name: str, source: str) -> set[str]:
    """Return the modules and packages that a module imports but may not."""
    modules = imported(source, name.rpartition(".")[0])
    return forbidden(name, {other for other in modules if other.split(".")[0] not in STANDARD})


def test_imports_run_down_the_floors() -> None:
    found = {
        name: modules
        for path in MODULES
        if (name := name_of(path)) != "gllm" and (modules := forbidden_imports(name, text_of(path)))
    }
    assert found == {}


def test_rooms_fill_21_packages_on_12_floors() -> None:
    rooms = {room_of(name) for name in NAMES if name != "gllm"}
    packages = {room for room in rooms if (ROOT / "gllm" / room).is_dir()}
    assert len(packages | {"demo"}) == 21
    assert rooms | {"demo"} == frozenset().union(*FLOORS)
    assert len(FLOORS) == 12


def test_the_check_finds_what_does_not_belong() -> None:
    assert forbidden_imports("gllm.scheduler.x", "import torch, json") == {"torch"}
    upward = "def f():\n    from gllm.runtime.messaging.bus import Hub"
    assert forbidden_imports("gllm.transport.x", upward) == {"gllm.runtime.messaging.bus"}
    assert forbidden_imports("gllm.frontend.x", upward) == set()
    beside = "from gllm.routing.state import EngineState"
    assert forbidden_imports("gllm.pacing.x", beside) == {"gllm.routing.state"}
    assert forbidden_imports("gllm.runtime.head.x", "import torch") == {"torch"}
    assert forbidden_imports("gllm.runtime.worker.cpu.x", "import torch") == set()
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert forbidden_imports("gllm.config.x", hidden) == set()


def test_generated_parts_of_the_page_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_current_parts(page) == page


LIGHT = (
    "gllm.frontend.app",
    "gllm.frontend.server",
    "gllm.engine.engine",
    "gllm.commands.chat",
    "gllm.commands.bench.serve",
    "gllm.transport.link.mover",
)
"""Modules of packages that may load torch elsewhere."""
LIGHT_PACKAGES = (
    *("options", "scheduler", "routing", "pacing", "recovery", "messages", "observability"),
    *("config", "text", "sim", "plan", "router", "runtime.head", "runtime.node"),
    "runtime.messaging",
)
HEAVY = {"torch", "transformers", "sklearn", "matplotlib", "opentelemetry"}


IMPORT_ALL = """
import importlib, pkgutil, sys
heavy = set(sys.argv[1].split(","))
names = sys.argv[2].split(",")
for package in sys.argv[3].split(","):
    path = importlib.import_module(package).__path__
    names += (module.name for module in pkgutil.walk_packages(path, package + "."))
for name in names:
    importlib.import_module(name)
    if loaded := heavy & set(sys.modules):
        sys.exit(f"{name} loads {loaded}")
"""
"""Imports modules, and all modules of packages, until one has loaded a heavy package."""


def import_all(modules: Sequence[str], packages: Sequence[str]) -> str:
    """Import modules in a process of their own; return its error, empty if no heavy one loads."""
    arguments = [",".join(sorted(HEAVY)), ",".join(modules), ",".join(packages)]
    code = [sys.executable, "-c", IMPORT_ALL, *arguments]
    return subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=False).stderr


def test_light_modules_load_nothing_heavy() -> None:
    assert import_all(LIGHT, [f"gllm.{package}" for package in LIGHT_PACKAGES]) == ""


def test_a_heavy_import_is_found() -> None:
    assert "gllm.kernels.linear loads {'torch'}" in import_all(
        ["gllm.kernels.linear"], ["gllm.recovery"]
    )


def find_cycle(graph: Mapping[str, Set[str]]) -> list[str]:
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


def import_graph(sources: dict[str, str], packages: dict[str, str]) -> dict[str, set[str]]:
    """Return what each module imports of gllm.

    In kernels/ imports for type checkers count too: a kernel's file for GPUs and the file that
    calls it share types by a third one.
    """
    return {
        name: NAMES & imported(source, packages[name], name.startswith("gllm.kernels."))
        for name, source in sources.items()
    }


def test_modules_import_without_cycles() -> None:
    texts = {name_of(path): text_of(path) for path in MODULES}
    graph = import_graph(texts, {name_of(path): package_of(path) for path in MODULES})
    # Attention calls its kernels by name.
    named = {f"gllm.kernels.{backend.module}" for backend in BACKENDS.values()}
    graph["gllm.kernels.attention"] |= {name for name in named if ".triton." in name}
    assert find_cycle(graph) == []


@pytest.mark.parametrize("line", ["", "if TYPE_CHECKING:\n    ", "def f():\n    "])
def test_cycle_between_a_kernel_and_its_caller_is_found(line: str) -> None:
    caller, kernel = "gllm.kernels.qkv", "gllm.kernels.triton.qkv"
    sources = {
        caller: "def f():\n    from gllm.kernels.triton import qkv as gpu",
        kernel: f"{line}from gllm.kernels.qkv import rotate_and_store",
    }
    packages = {caller: "gllm.kernels", kernel: "gllm.kernels.triton"}
    assert find_cycle(import_graph(sources, packages)) == [caller, kernel, caller]


def test_cycle_through_a_package_is_found() -> None:
    sources = {
        "gllm.models.config": "from gllm.models import registry",
        "gllm.models.registry": "from .keys import KEYS",
        "gllm.models.keys": "def f():\n    from . import config",
    }
    graph = {name: imported(source, "gllm.models") for name, source in sources.items()}
    assert find_cycle(graph) == [*sources, "gllm.models.config"]


def test_no_module_loads_objects_that_run_code() -> None:
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert [name_of(path) for path in MODULES if imported(text_of(path)) & unsafe] == []


def constants_of(source: str) -> set[object]:
    return {node.value for node in ast.walk(parse(source)) if isinstance(node, ast.Constant)}


def test_one_place_builds_the_command_lines_of_child_processes() -> None:
    builders = {name_of(path) for path in MODULES if "-m" in constants_of(text_of(path))}
    # The tuner only writes its own command line into its results.
    assert builders == {"gllm.observability.child_process", "gllm.kernels.tune"}
    starters = {
        name
        for path in MODULES
        if "sys.executable" in text_of(path) and (name := name_of(path)) not in builders
    }
    assert starters == set(), "a child process is started by module_command"
