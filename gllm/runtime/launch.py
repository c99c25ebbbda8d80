"""Start, supervision and end of the worker processes.

It has the processes, the descriptors they inherit and the private folder of their sockets. It
imports no torch.
"""

import asyncio
import os
import secrets
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
from gllm.runtime.session import HEAD_SENDER
from gllm.runtime.spec import WorkerSpec
from gllm.transport.edge import Edge, create_edge

STOP_SECONDS = 5.0
"""Time that a worker has to exit before it is killed."""


class WorkerGroup(ABC):
    """The workers of one pipeline on this host: socket addresses, edges and specs.

    Subclasses run the workers, as processes or within this one.
    """

    def __init__(self, num_stages: int, name: str = "gllm") -> None:
        self._socket_folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        folder = f"ipc://{self._socket_folder}"
        self.run = secrets.randbits(64)
        """Number of this start of the parent, which no other start has."""
        self.senders = list(range(HEAD_SENDER + 1, HEAD_SENDER + 1 + num_stages))
        """Id of each stage's worker."""
        self.head_address = f"{folder}/head"
        self.driver_address = f"{folder}/driver"
        self._edges = [create_edge(f"{name}-edge-{stage}") for stage in range(num_stages - 1)]
        self._kernel_ratios: int | None = None
        """Descriptor of the file in which stages share measurements of compiled kernels."""

    @abstractmethod
    def start(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> None:
        """Send each worker its spec.

        Args:
            config: of the engine, with max_model_len resolved.
            folder: of the model.
            layers: of each stage.
            logs: configuration of the workers' logs.
        """

    @abstractmethod
    def watch(self, on_exit: Callable[[int, str], None]) -> None:
        """Watch the workers; needs a running event loop.

        on_exit: called once per worker that exits, with its stage and a description.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message."""

    def remove_sockets(self) -> None:
        """Remove the sockets' names, so that nothing else can connect."""
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    def _create_specs(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> list[WorkerSpec]:
        """Return the spec of each stage."""
        specs = []
        for stage, stage_layers in enumerate(layers):
            incoming, outgoing = self._stage_edges(stage)
            specs.append(
                WorkerSpec(
                    stage=stage,
                    num_stages=len(layers),
                    layers=(stage_layers.start, stage_layers.stop),
                    layer_counts=[len(each) for each in layers],
                    model_folder=str(folder),
                    config=config,
                    run=self.run,
                    sender=self.senders[stage],
                    senders=self.senders,
                    head_address=self.head_address,
                    driver_address=self.driver_address,
                    incoming=incoming,
                    outgoing=outgoing,
                    logs=logs,
                    kernel_ratios=self._kernel_ratios,
                )
            )
        return specs

    def _stage_edges(self, stage: int) -> tuple[Edge | None, Edge | None]:
        """Return the edges from the previous stage and to the next one."""
        incoming = self._edges[stage - 1] if stage > 0 else None
        outgoing = self._edges[stage] if stage < len(self._edges) else None
        return incoming, outgoing


class WorkerProcesses(WorkerGroup):
    """Workers as processes; they import torch while they wait for their specs."""

    def __init__(self, num_stages: int) -> None:
        """Start the processes.

        Raises:
            ValueError: GLLM_CPU_KERNELS names a build that cannot be used.
        """
        select_build()
        super().__init__(num_stages)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watched: dict[int, int] = {}
        """Descriptor of the process by stage."""
        ratios = self._kernel_ratios = os.memfd_create("gllm-kernel-ratios")
        try:
            for stage in range(num_stages):
                edges = [edge for edge in self._stage_edges(stage) if edge is not None]
                descriptors = [each for edge in edges for each in edge.descriptors]
                self.processes.append(self._spawn(stage, [*descriptors, ratios]))
        except BaseException:
            self.kill()
            raise
        finally:
            for edge in self._edges:
                edge.close()
            os.close(ratios)

    def start(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> None:
        """Write each process's spec to its standard input."""
        specs = self._create_specs(config, folder, layers, logs)
        for process, spec in zip(self.processes, specs, strict=True):
            pipe = process.stdin
            assert pipe is not None
            # `watch` reports a process that has exited already.
            with suppress(BrokenPipeError), pipe:
                pipe.write(msgspec.json.encode(spec) + b"\n")

    def watch(self, on_exit: Callable[[int, str], None]) -> None:
        """See WorkerGroup."""
        loop = asyncio.get_running_loop()

        def report(stage: int) -> None:
            self._unwatch(stage)
            on_exit(stage, self._describe_exit(stage))

        for stage, process in enumerate(self.processes):
            self._watched[stage] = os.pidfd_open(process.pid)
            loop.add_reader(self._watched[stage], report, stage)

    async def stop(self) -> None:
        """Wait until the workers have exited; kill those that take longer than STOP_SECONDS."""
        for stage in list(self._watched):
            self._unwatch(stage)
        deadline = asyncio.get_running_loop().time() + STOP_SECONDS
        while any(process.poll() is None for process in self.processes):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Kill all processes and remove the sockets."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.remove_sockets()

    @staticmethod
    def _spawn(stage: int, descriptors: list[int]) -> "subprocess.Popen[bytes]":
        """Start a process that inherits the descriptors."""
        command = [sys.executable, "-m", "gllm.runtime", str(stage), str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=descriptors)

    def _unwatch(self, stage: int) -> None:
        descriptor = self._watched.pop(stage)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _describe_exit(self, stage: int) -> str:
        """Describe how a worker exited."""
        process = self.processes[stage]
        code = process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"the worker of stage {stage} (process {process.pid}) {how}"
