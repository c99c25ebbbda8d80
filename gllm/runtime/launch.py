"""Starts the worker processes, watches over them, ends them.

Owns processes, the descriptors they inherit and the private folder of their sockets. Knows nothing
of requests. Needs no torch.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gllm.config.engine import EngineConfig
from gllm.kernels.native.builds import select_build
from gllm.observability.logs import LogConfig
from gllm.runtime.spec import WorkerSpec
from gllm.transport.edge import Edge, create_edge

STOP_SECONDS = 5.0
"""What a worker gets to end by itself before it is killed."""


class PipelineWorkers(ABC):
    """The workers of one pipeline on this host: addresses of their sockets, edges, specs.

    Subclasses run them, as processes or within this one.
    """

    def __init__(self, stages: int, name: str = "gllm") -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.frontend = f"ipc://{self._sockets}/frontend"
        self.inboxes = [f"ipc://{self._sockets}/stage-{stage}" for stage in range(stages)]
        self._edges = [create_edge(f"{name}-edge-{stage}") for stage in range(stages - 1)]
        self._kernel_ratios: int | None = None

    @abstractmethod
    def tell(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> None:
        """Give each worker its stage of the model in the folder; one entry of `layers` each."""

    @abstractmethod
    def watch(self, died: Callable[[int, str], None]) -> None:
        """Call `died` with the stage and how, once, when a worker is gone. Needs a running loop."""

    @abstractmethod
    async def stop(self) -> None:
        """Wait until the workers, told to end, are gone."""

    def hide(self) -> None:
        """Remove the sockets' names once everybody is connected: nobody else can come in."""
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _specs(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> list[WorkerSpec]:
        """Return the spec of each stage."""
        return [
            WorkerSpec(
                stage=stage,
                stages=len(layers),
                layers=(part.start, part.stop),
                layer_counts=[len(each) for each in layers],
                folder=str(folder),
                config=config,
                frontend=self.frontend,
                inboxes=self.inboxes,
                incoming=incoming,
                outgoing=outgoing,
                logs=logs,
                kernel_ratios=self._kernel_ratios,
            )
            for stage, part in enumerate(layers)
            for incoming, outgoing in [self._edges_of(stage)]
        ]

    def _edges_of(self, stage: int) -> tuple[Edge | None, Edge | None]:
        """Return the edges from the previous stage and to the next one."""
        incoming = self._edges[stage - 1] if stage > 0 else None
        outgoing = self._edges[stage] if stage < len(self._edges) else None
        return incoming, outgoing


class Workers(PipelineWorkers):
    """Workers as processes. They import torch from the moment this is made; `tell` says what they
    are to be."""

    def __init__(self, stages: int) -> None:
        """Raises ValueError where GLLM_CPU_KERNELS names a build that cannot be used."""
        select_build()
        super().__init__(stages)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watched: dict[int, int] = {}
        ratios = self._kernel_ratios = os.memfd_create("gllm-kernel-ratios")
        try:
            for stage in range(stages):
                edges = [edge for edge in self._edges_of(stage) if edge is not None]
                descriptors = [each for edge in edges for each in edge.descriptors]
                self.processes.append(self._spawn(stage, [*descriptors, ratios]))
        except BaseException:
            self.kill()
            raise
        finally:
            for edge in self._edges:
                edge.close()
            os.close(ratios)

    def tell(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> None:
        """Write each process's spec to its standard input."""
        specs = self._specs(config, folder, layers, logs)
        for process, spec in zip(self.processes, specs, strict=True):
            pipe = process.stdin
            assert pipe is not None
            # One that is gone already is found by `watch`.
            with suppress(BrokenPipeError), pipe:
                pipe.write(msgspec.json.encode(spec) + b"\n")

    def watch(self, died: Callable[[int, str], None]) -> None:
        """Call `died` with the stage and how, once, when a worker is gone. Needs a running loop."""
        loop = asyncio.get_running_loop()

        def gone(stage: int) -> None:
            self._unwatch(stage)
            died(stage, self._ending(stage))

        for stage, process in enumerate(self.processes):
            self._watched[stage] = os.pidfd_open(process.pid)
            loop.add_reader(self._watched[stage], gone, stage)

    async def stop(self) -> None:
        """Wait until the workers, told to end, are gone; kill those that take too long."""
        for stage in list(self._watched):
            self._unwatch(stage)
        deadline = asyncio.get_running_loop().time() + STOP_SECONDS
        while any(process.poll() is None for process in self.processes):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End everything at once."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.hide()

    @staticmethod
    def _spawn(stage: int, inherited: list[int]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "gllm.runtime", str(stage), str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)

    def _unwatch(self, stage: int) -> None:
        descriptor = self._watched.pop(stage)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _ending(self, stage: int) -> str:
        """How a worker that is gone ended, in words."""
        process = self.processes[stage]
        code = process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"the worker of stage {stage} (process {process.pid}) {how}"
