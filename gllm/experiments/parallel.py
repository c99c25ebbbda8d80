"""Independent runs spread over the cores of this machine, with a progress bar."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_parallel(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    progress: bool = True,
    unit: str = "run",
) -> list[Result]:
    """Return the results of a function for all items, in their order.

    Args:
        function: A function of a module, which other processes can import.
        items: Arguments, one per call.
        jobs: Number of processes; 1 computes everything in this one.
        progress: Show a progress bar if the output is a terminal.
        unit: Name of one call in the progress bar.
    """
    # None: no bar where the output is no terminal.
    disable = None if progress else True
    bar = {"total": len(items), "unit": unit, "disable": disable}
    if jobs == 1 or len(items) < 2:
        return [function(item) for item in tqdm(items, **bar)]
    with ProcessPoolExecutor(min(jobs, len(items))) as pool:
        return list(tqdm(pool.map(function, items), **bar))
