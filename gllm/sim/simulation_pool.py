"""Processes that simulate in parallel, and their end at an interrupt (Ctrl-C)."""

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor


def open_simulation_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool whose processes ignore SIGINT, which a terminal sends to all of a command."""
    return ProcessPoolExecutor(jobs, initializer=_ignore_interrupts)


def end_simulations() -> None:
    """End the processes of this process's pools, so that nothing waits for their simulations."""
    for process in multiprocessing.active_children():
        process.terminate()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
