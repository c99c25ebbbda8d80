"""CPU backend of a stage."""

from gllm.kernels.native.library import share_measurements
from gllm.models.config import ModelConfig
from gllm.runtime.backend import resolve_step_limits
from gllm.runtime.cpu.executor import CpuExecutor
from gllm.runtime.spec import WorkerSpec
from gllm.scheduler.config import SchedulerConfig


class CpuBackend:
    """Executor of a stage in the host's memory, which all stages share."""

    transport = "shared-memory"
    streams = None
    host_seconds = 0.0
    num_compilations = 0

    def __init__(self, spec: WorkerSpec, model: ModelConfig) -> None:
        """Create the executor; see `gllm.runtime.worker.create_backend`."""
        share_measurements(spec.kernel_ratios)
        layers = range(*spec.layers)
        self.executor = CpuExecutor(model, spec.config, spec.stage, spec.num_stages, layers)
        self._spec = spec

    def reserve(self) -> SchedulerConfig:
        """See DeviceBackend; a CPU needs no memory in advance."""
        return resolve_step_limits(self._spec)

    def available_bytes(self) -> int | None:
        """See DeviceBackend."""
        return None

    def prepare_steps(self) -> None:
        """See DeviceBackend; a CPU compiles nothing."""
