"""Replacements for packages that a bare machine may lack.

gllm's stage path within one process needs msgspec only for classes with named fields. Messages
between processes need the package itself.
"""

import dataclasses
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any, dataclass_transform


def missing(*names: str) -> list[str]:
    """Return the packages that are not installed."""
    return [
        name for name in names if name not in sys.modules and not importlib.util.find_spec(name)
    ]


@dataclass_transform()
class Struct:
    """Replacement for msgspec.Struct: annotations are fields, after inherited ones."""

    def __init_subclass__(cls, frozen: bool = False, **options: Any) -> None:
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict):
                # Each object has its own copy.
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        # Never frozen: frozen and mutable classes derive from this one.
        dataclasses.dataclass(cls)


class _Codec:
    """Replacement for encoders and decoders; nothing is encoded within one process."""

    def __init__(self, *of: Any) -> None:
        pass

    def __class_getitem__(cls, of: Any) -> type:
        return cls


class Meta:
    """Replacement for msgspec.Meta: bounds of an annotation, which only a codec checks."""

    def __init__(self, **bounds: Any) -> None:
        pass


def provide_msgspec() -> bool:
    """Install the replacement if msgspec is missing; return True if it was."""
    if not missing("msgspec"):
        return False
    module: Any = ModuleType("msgspec")
    module.Struct, module.Meta, module.field = Struct, Meta, dataclasses.field
    module.structs = ModuleType("msgspec.structs")
    module.structs.replace = dataclasses.replace
    module.msgpack = ModuleType("msgspec.msgpack")
    module.msgpack.Encoder = module.msgpack.Decoder = _Codec
    sys.modules["msgspec"] = module
    return True
