"""Processes that a signal stops."""

import asyncio
import os
import signal
from pathlib import Path


async def stop_process(process_id: int) -> None:
    """Send SIGSTOP to a process and wait until all of its threads have stopped.

    Its other threads go on until the kernel has scheduled the one that receives the signal.
    Returns as well if the process ends meanwhile.
    """
    os.kill(process_id, signal.SIGSTOP)
    while _has_running_thread(process_id):
        await asyncio.sleep(0.001)


def _has_running_thread(process_id: int) -> bool:
    try:
        threads = list(Path(f"/proc/{process_id}/task").iterdir())
        return any("State:\tT" not in (each / "status").read_text() for each in threads)
    except OSError:
        return False
