"""Pareto set of candidates."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def pareto_set(items: Sequence[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Return the items that no other one dominates, by rising first cost.

    An item dominates another one if none of its costs is higher and one is lower. Of items with
    equal costs the first is kept.

    Args:
        items: The candidates.
        costs: Quantities of an item of which less is better; always as many.
    """
    chosen: list[tuple[tuple[float, ...], Item]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: pair[0]):
        # In this order, only an earlier item can dominate.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in chosen):
            chosen.append((cost, item))
    return [item for _, item in chosen]
