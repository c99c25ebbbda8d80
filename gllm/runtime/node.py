"""Interface of a node, the machine that runs workers, and the edges and sockets between them.

The supervisor decides which workers there are and which stages they run; a node carries that out.
This module imports no torch.
"""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from gllm.cluster.liveness import ProcessSample
from gllm.cluster.placement import Placement
from gllm.config.engine import EngineConfig
from gllm.runtime.assignment import StageAssignment, WorkerIdentity
from gllm.transport.edge import Edge, create_edge

OnExit = Callable[[int, str], None]
"""Called with the sender of a worker that has exited and been reaped, and a description."""


class Node(ABC):
    """Workers that subclasses run, as processes or within this one."""

    def __init__(self, name: str = "gllm") -> None:
        """Create a node; `name` begins the names of its files."""
        self._name = name
        self._driver_folder: Path | None = None
        """Private folder of the socket of the current generation's driver."""

    @abstractmethod
    def watch(self, on_exit: OnExit) -> None:
        """Report exits of workers from now on; needs a running event loop.

        on_exit: called once per worker that exits before `stop`.
        """

    @abstractmethod
    def spawn(self, identity: WorkerIdentity) -> None:
        """Start a worker.

        Raises:
            OSError: the system has no process or descriptor left.
        """

    @abstractmethod
    def kill(self, sender: int) -> None:
        """Kill a worker; its exit is reported as that of any other."""

    @abstractmethod
    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process; None if it has exited or has none of its own."""

    @abstractmethod
    def dump_stacks(self, sender: int) -> None:
        """Make a worker write the stacks of its threads, which `read_stacks` returns soon after."""

    @abstractmethod
    def read_stacks(self, sender: int) -> str:
        """Return the stacks that a worker has written; also after a crash, within `on_exit`."""

    @abstractmethod
    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message; kill those that do not."""

    @abstractmethod
    def _send(self, assignment: StageAssignment) -> None:
        """Send a worker its assignment; the descriptors in it are closed afterwards."""

    def assign(
        self,
        placement: Placement,
        config: EngineConfig,
        folder: Path,
        plan_record: int | None = None,
        restart_cause: str = "",
        num_resumed_requests: int = 0,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """Send each worker of a placement its stage, with new edges and a new driver's address.

        Args:
            placement: of the next generation.
            config: of the engine, with max_model_len resolved.
            folder: of the model.
            plan_record: descriptor of the file for the driver's plans in flight; stays open here.
            restart_cause: reason for which the previous generation ended.
            num_resumed_requests: requests that will be submitted again.
            output_lengths: output lengths of earlier generations, for the scheduler.

        Raises:
            OSError: a file cannot be created; no worker was sent anything.
        """
        self.on_generation_ready()
        self._driver_folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-driver-"))
        incoming: dict[int, Edge] = {}
        outgoing: dict[int, Edge] = {}
        try:
            for spec in placement.edges:
                edge = create_edge(f"{self._name}-edge-{spec.number}", spec.transport)
                incoming[spec.target] = outgoing[spec.source] = edge
            for worker in placement.workers:
                stage = worker.stage
                self._send(
                    StageAssignment(
                        placement,
                        worker.sender,
                        config,
                        str(folder),
                        f"ipc://{self._driver_folder}/driver",
                        incoming.get(stage),
                        outgoing.get(stage),
                        plan_record if stage == 0 else None,
                        restart_cause,
                        num_resumed_requests,
                        output_lengths or {} if stage == 0 else {},
                    )
                )
        finally:
            for edge in incoming.values():
                edge.close()

    def on_generation_ready(self) -> None:
        """Remove the driver's address: all workers have connected, and nothing else may."""
        if self._driver_folder is not None:
            shutil.rmtree(self._driver_folder, ignore_errors=True)
            self._driver_folder = None
