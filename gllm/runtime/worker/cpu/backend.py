"""CPU backend of a stage."""

from gllm.models.config import ModelConfig
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.scheduler.config import SchedulerConfig


class CpuBackend:
    """Executor of a worker in the host's memory, which all workers share."""

    transport = collectives = "shared-memory"
    streams = None
    host_seconds = 0.0
    num_compilations = 0

    def __init__(
        self, assignment: StageAssignment, model: ModelConfig, layers: range | None = None
    ) -> None:
        """Create the executor; see `gllm.runtime.worker.stage_loader.create_backend`."""
        layers = range(*assignment.layers) if layers is None else layers
        self.executor = CpuExecutor(
            model,
            assignment.config,
            assignment.num_stages,
            layers,
            rank=assignment.rank,
            num_ranks=assignment.num_ranks,
        )
        self._assignment = assignment

    def reserve(self) -> SchedulerConfig:
        """See DeviceBackend; a CPU needs no memory in advance."""
        return self._assignment.resolve_scheduler()

    def available_bytes(self) -> int | None:
        """See DeviceBackend."""
        return None

    def prepare_steps(self) -> None:
        """See DeviceBackend; a CPU compiles nothing."""
