"""A stage's profile: what torch saw it compute, as a Chrome trace.

Owns the recording and its file. Knows nothing of steps; runs beside them, on threads of its own.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.messages.control import CommandDone
from gllm.runtime.bus import Outbox

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)


class TorchProfiler:
    """Records all threads of this process between two turns. `frontend` hears of each turn."""

    def __init__(self, stage: int, frontend: Outbox) -> None:
        self._stage = stage
        self._frontend = frontend
        self._recording: profile | None = None
        self._folder = ""
        self._turning: asyncio.Task[None] | None = None

    def turn(self, question: int, folder: str) -> None:
        """Begin to record, for a file in this folder; without one end and write it. The answer
        carries the number of the question."""
        before, loop = self._turning, asyncio.get_running_loop()
        self._turning = loop.create_task(self._turn(question, folder, before))

    async def _turn(self, question: int, folder: str, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await before
        error = ""
        try:
            await asyncio.to_thread(self._begin if folder else self._end, folder)
        except Exception as failure:
            log.exception("the profile failed")
            error = f"{type(failure).__name__}: {failure}"
        self._frontend.send(CommandDone(question, self._stage, error))

    def _begin(self, folder: str) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        if self._recording is not None:
            raise RuntimeError("a profile is being recorded")
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Without this only the thread that starts it is recorded.
        recording = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        recording.start()
        self._recording, self._folder = recording, folder

    def _end(self, folder: str) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            raise RuntimeError("no profile is being recorded")
        recording.stop()
        moment = time.strftime("%Y%m%d-%H%M%S")
        path = Path(self._folder, f"stage-{self._stage}-{moment}.json")
        recording.export_chrome_trace(str(path))
        log.info("profile written to %s", path)
