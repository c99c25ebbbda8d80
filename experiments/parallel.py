"""Independent runs spread over the cores of this machine, with a progress bar."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from gllm.observability.progress import ProgressBar, show_progress

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
        progress: Show the progress on standard error.
        unit: Name of one call in the progress bar.
    """
    with show_progress(unit, len(items), is_shown=progress) as bar:
        if jobs == 1 or len(items) < 2:
            return _count_results(map(function, items), bar)
        with ProcessPoolExecutor(min(jobs, len(items))) as pool:
            return _count_results(pool.map(function, items), bar)


def _count_results(results: Iterator[Result], bar: ProgressBar) -> list[Result]:
    """Return the results, counted as they arrive."""
    counted = []
    for result in results:
        counted.append(result)
        bar.update()
    return counted
