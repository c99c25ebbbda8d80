"""Properties of torch's operations that depend on their kind and their arguments' layouts alone.

Each is computed once per kind and layout: the tests of a device run some hundred thousand
operations, nearly all of the same few layouts.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_layouts: dict[Hashable, Any] = {}


def result_layouts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return an operation's results as tensors without memory.

    Raises:
        NotImplementedError, RuntimeError: A shape depends on the arguments' values.
    """
    key = func, layout_key(args), layout_key(kwargs)
    try:
        return _layouts[key]
    except KeyError:
        results = _layouts[key] = _compute_layouts(func, args, kwargs)
        return results
    except TypeError:
        # An argument has no hash.
        return _compute_layouts(func, args, kwargs)


def layout_key(value: Any) -> Hashable:
    """Return a key that two arguments share if they are equal but for the numbers in tensors."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(layout_key, value)
    if isinstance(value, dict):
        return dict, *((name, layout_key(each)) for name, each in value.items())
    # 1, 1.0 and True are equal, and results of different types come of them.
    return type(value), value


def _compute_layouts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def on_meta(tensor: Tensor) -> Tensor:
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")

    there = {"device": torch.device("meta")} if "device" in kwargs else {}
    args, kwargs = tree_map_only(Tensor, on_meta, (args, kwargs | there))
    return func(*args, **kwargs)


@cache
def is_composite(func: Any) -> bool:
    """Return True if an operation consists of other operations of torch."""
    return bool(func._can_decompose())


@cache
def is_view(func: Any) -> bool:
    """Return True if an operation only looks at memory in another way."""
    infos = [result.alias_info for result in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


@cache
def _written_parameters(func: Any) -> list[tuple[int, str]]:
    """Return the places and names of the parameters that an operation writes."""
    return [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation of torch writes, by its schema."""
    return tensors_in(
        *(
            args[index] if index < len(args) else kwargs.get(name)
            for index, name in _written_parameters(func)
        )
    )


def tensors_in(*trees: Any) -> list[Tensor]:
    """Return all tensors in lists, tuples and values of dictionaries, in their order."""
    tensors: list[Tensor] = []
    _collect_tensors(trees, tensors)
    return tensors


def _collect_tensors(values: Any, tensors: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            _collect_tensors(value, tensors)
        elif isinstance(value, dict):
            _collect_tensors(value.values(), tensors)
