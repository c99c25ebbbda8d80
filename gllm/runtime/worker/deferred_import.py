"""Import of a module that is executed when something first reads an attribute of it.

Unlike `importlib.util.LazyLoader`, it is not executed by an import statement of its package. It
imports almost nothing, because worker processes import it first.
"""

from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from sys import modules
from types import ModuleType
from typing import Any

UNUSED_TORCH_MODULES = ("_meta_registrations",)
"""Modules that register kernels of tensors without data, which only torch.compile and torch.export
use: a fifth of the CPU time of torch's import, and 18 MB of the process."""


class _DeferredModule(ModuleType):
    """Module that is executed before the first attribute is read that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        # Imports and inspection read attributes such as __path__ of any module.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


def defer_import(package: str, name: str) -> None:
    """Let imports of a package's module not execute it before an attribute of it is read.

    A module that does not exist or is imported already is left as it is. The package itself is not
    imported.

    Args:
        package: top-level package.
        name: name of the module in the package.
    """
    full_name = f"{package}.{name}"
    parent = find_spec(package)
    if full_name in modules or parent is None:
        return
    spec = PathFinder.find_spec(full_name, parent.submodule_search_locations)
    if spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _DeferredModule
    modules[full_name] = module
