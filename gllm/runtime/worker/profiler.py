"""Profile of a worker: a recording of torch's profiler as a Chrome trace.

It starts and stops on threads of its own, beside the worker's steps.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.messages.control import CommandDone, StartProfile, StopProfile
from gllm.recovery.placement import PlaceName
from gllm.runtime.messaging.spoke import Spoke

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)


class TorchProfiler:
    """Recorder of all threads of this process; it reports each finished command."""

    def __init__(self, place: PlaceName, frontend: Spoke) -> None:
        self._place = place
        self._frontend = frontend
        self._profile: profile | None = None
        self._folder = ""
        self._last_command: asyncio.Task[None] | None = None

    def handle(self, command: StartProfile | StopProfile) -> None:
        """Run a command after the previous ones and report its end to the frontend."""
        loop = asyncio.get_running_loop()
        self._last_command = loop.create_task(self._run(command, self._last_command))

    async def _run(
        self, command: StartProfile | StopProfile, previous: "asyncio.Task[None] | None"
    ) -> None:
        if previous is not None:
            await previous
        error = ""
        try:
            if isinstance(command, StartProfile):
                await asyncio.to_thread(self._start, command.folder)
            else:
                await asyncio.to_thread(self._stop)
        except Exception as failure:
            log.exception("the profile failed")
            error = f"{type(failure).__name__}: {failure}"
        self._frontend.send(CommandDone(command.command_id, self._place.stage, error))

    def _start(self, folder: str) -> None:
        """Start recording; the file goes to `folder`."""
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        if self._profile is not None:
            raise RuntimeError("a profile is being recorded")
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Without this option only the thread that starts the profile is recorded.
        recording = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        recording.start()
        self._profile, self._folder = recording, folder

    def _stop(self) -> None:
        """Stop recording and write the file."""
        recording, self._profile = self._profile, None
        if recording is None:
            raise RuntimeError("no profile is being recorded")
        recording.stop()
        timestamp = time.strftime("%Y%m%d-%H%M%S")
        path = Path(self._folder, f"stage-{self._place.label}-{timestamp}.json")
        recording.export_chrome_trace(str(path))
        log.info("profile written to %s", path)
