"""Interface of a stage's device backend: its executor, its transport and the order of start-up.

`gllm.runtime.worker.cpu.backend` and `gllm.runtime.worker.cuda.backend` implement it.
"""

from typing import TYPE_CHECKING, Protocol

from gllm.runtime.worker.executor import Executor
from gllm.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from gllm.transport.device_streams import DeviceRuntime, DeviceStream


class DeviceBackend(Protocol):
    """Device of one stage, from the start of its process to its first step.

    A worker calls `reserve`, opens its edges and groups, and then calls `available_bytes`,
    `executor.allocate` and `prepare_steps`.
    """

    @property
    def executor(self) -> Executor:
        """Executor of the stage."""

    @property
    def transport(self) -> str:
        """Default transport of edges; a name of gllm.transport.registry."""

    @property
    def collectives(self) -> str:
        """Implementation of the groups of ranks; a name of gllm.transport.groups."""

    @property
    def streams(self) -> "tuple[DeviceRuntime, DeviceStream] | None":
        """The device's queues and the compute stream, for transports; None on a CPU."""

    def reserve(self) -> SchedulerConfig:
        """Allocate the memory for steps.

        Returns:
            The scheduler's configuration, resolved except for the number of KV blocks.
        """

    def available_bytes(self) -> int | None:
        """Return the bytes for KV blocks in the device's own memory; None for the host's memory.

        Has to be called with the weights loaded and the edges open, because both take memory.
        """

    def prepare_steps(self) -> None:
        """Compile kernels and record graphs, with the KV cache allocated."""

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to queue their work; 0 on a CPU."""

    @property
    def num_compilations(self) -> int:
        """Kernels compiled since `prepare_steps`."""
