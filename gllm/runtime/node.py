"""Interface of a node, the machine that runs workers, and the files and sockets between them.

The supervisor decides which workers there are and which stages they run; a node carries that out.
This module imports no torch.
"""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from gllm.cluster.liveness import ProcessSample
from gllm.cluster.placement import EdgeSpec, Placement, WorkerPlacement
from gllm.config.engine import EngineConfig
from gllm.runtime.assignment import StageAssignment, WorkerIdentity
from gllm.transport.edge import Edge, create_edge
from gllm.transport.region import Region, create_region

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

    def measure(self, placement: Placement, config: EngineConfig, folder: Path) -> None:
        """Let each worker of a placement measure its speed.

        Args:
            placement: with preliminary layers.
            config: of the engine, with max_model_len resolved.
            folder: of the model.
        """
        for sender in placement.senders:
            self._send(StageAssignment(placement, sender, config, str(folder), "", is_probe=True))

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
        """Send each worker of a placement its stage, with new files and a new driver's address.

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
        with ExitStack() as files:
            edges, regions = self._create_files(placement, files)
            for worker in placement.workers:
                has_driver = (worker.stage, worker.rank) == (0, 0)
                self._send(
                    StageAssignment(
                        placement,
                        worker.sender,
                        config,
                        str(folder),
                        f"ipc://{self._driver_folder}/driver",
                        next((edge for spec, edge in edges if _is_target(worker, spec)), None),
                        [edge for spec, edge in edges if _is_source(worker, spec)],
                        regions.get(worker.stage),
                        plan_record if has_driver else None,
                        restart_cause,
                        num_resumed_requests,
                        output_lengths or {} if has_driver else {},
                    )
                )

    def _create_files(
        self, placement: Placement, files: ExitStack
    ) -> tuple[list[tuple[EdgeSpec, Edge]], dict[int, Region]]:
        """Return new edges, and a new region for each stage with several ranks.

        Args:
            placement: of the next generation.
            files: closes the descriptors in this process.

        Raises:
            OSError: a file cannot be created.
        """
        edges: list[tuple[EdgeSpec, Edge]] = []
        for spec in placement.edges:
            edge = create_edge(f"{self._name}-edge-{spec.number}", spec.transport)
            files.callback(edge.close)
            edges.append((spec, edge))
        regions: dict[int, Region] = {}
        for stage, num_ranks in enumerate(placement.degrees):
            if num_ranks > 1:
                regions[stage] = create_region(f"{self._name}-region-{stage}")
                files.callback(regions[stage].close)
        return edges, regions

    def on_generation_ready(self) -> None:
        """Remove the driver's address: all workers have connected, and nothing else may."""
        if self._driver_folder is not None:
            shutil.rmtree(self._driver_folder, ignore_errors=True)
            self._driver_folder = None


def _is_target(worker: WorkerPlacement, edge: EdgeSpec) -> bool:
    return (worker.stage, worker.rank) == (edge.target, edge.target_rank)


def _is_source(worker: WorkerPlacement, edge: EdgeSpec) -> bool:
    return (worker.stage, worker.rank) == (edge.source, edge.source_rank)
