"""CUDA backend of a stage: choice of the GPU and of the transport, and the order of start-up."""

import logging
from typing import TYPE_CHECKING

from gllm.kernels.triton.common import CompilationCounter
from gllm.models.config import ModelConfig
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.executor import DeviceBackend
from gllm.scheduler.config import SchedulerConfig
from gllm.transport.device_streams import CudaRuntime

if TYPE_CHECKING:
    from gllm.runtime.head.assignment import StageAssignment

log = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 256
"""Decodes in the largest graph; with more rows the device has enough work in each kernel."""


class CudaBackend(DeviceBackend):
    """Selects a worker's GPU, allocates its memory and prepares its executor for serving.

    With fewer GPUs than workers on a machine, workers share GPUs.
    """

    executor: CudaExecutor

    def __init__(
        self,
        assignment: "StageAssignment",
        model: ModelConfig,
        num_gpus: int,
        layers: range,
    ) -> None:
        """Create the executor; see `gllm.runtime.worker.stage_resources.create_backend`."""
        runtime = CudaRuntime(assignment.local_index % num_gpus)
        executor = CudaExecutor(
            model,
            assignment.config,
            assignment.num_stages,
            layers,
            runtime,
            rank=assignment.rank,
            num_ranks=assignment.num_ranks,
        )
        super().__init__(assignment, executor)
        self.streams = runtime, executor.stream
        self._max_workers_per_gpu = -(-assignment.num_local_workers // num_gpus)
        self.transport = "nccl" if self._max_workers_per_gpu == 1 else "host-staging"
        self.collectives = self.transport
        self._counter: CompilationCounter | None = None

    def reserve(self) -> SchedulerConfig:
        """Allocate the memory for steps; a CPU needs none in advance."""
        config = super().reserve()
        self.executor.reserve(config)
        return config

    def available_bytes(self) -> int | None:
        """Return the bytes for KV blocks in the device's own memory; None for the host's memory.

        Workers on one GPU get equal shares.
        """
        config = self._assignment.config
        num_bytes = self.executor.available_bytes(
            config.gpu_memory_utilization, config.scheduler.block_size, self._graph_rows
        )
        return num_bytes // self._max_workers_per_gpu

    def prepare_steps(self) -> None:
        """Compile kernels and record graphs, with the KV cache allocated; a CPU has none.

        The log shows the progress.
        """
        log.info("compiling kernels")
        self.executor.warm_up()
        self.executor.record_graphs(
            self._graph_rows, lambda done, total: log.info("graph %d/%d", done, total)
        )
        self.executor.measure_expert_costs()
        self._counter = CompilationCounter()

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to queue their work; 0 on a CPU."""
        return self.executor.host_seconds

    @property
    def num_compilations(self) -> int:
        """Kernels compiled since `prepare_steps`; 0 on a CPU."""
        return 0 if self._counter is None else self._counter.count

    @property
    def _graph_rows(self) -> int:
        """Rows of the largest graph."""
        return min(self._assignment.config.scheduler.max_num_seqs, MAX_GRAPH_ROWS)
