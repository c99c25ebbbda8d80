"""A stage on a GPU, from its process's first moment to its first step.

Owns which GPU a stage gets, how stages on GPUs are joined, and the order of start-up. Knows nothing
of messages.
"""

import logging

from gllm.config.engine import EngineConfig
from gllm.kernels.triton.compilations import CompilationCounter
from gllm.models.config import ModelConfig
from gllm.runtime.cuda.executor import DeviceExecutor
from gllm.scheduler.config import SchedulerConfig
from gllm.transport.device_streams import CudaRuntime

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Decodes in the largest graph; behind that the device has enough to do with each kernel."""


class OnGpu:
    """One stage's device and executor."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        stage: int,
        stages: int,
        layers: range,
        count: int,
    ) -> None:
        """`count`: GPUs of this host. Where there are fewer than stages they take turns."""
        self.queues = CudaRuntime(stage % count)
        self.executor = DeviceExecutor(model, config, stage, stages, layers, self.queues)
        self._config, self._stages = config, stages
        self._sharing = -(-stages // count)
        """Stages on this GPU, or one more."""
        self._counter: CompilationCounter | None = None
        self.transport = "nccl" if self._sharing == 1 else "host-staging"

    def reserve(self) -> SchedulerConfig:
        """Make room for steps; return the configuration that tells how large they are, resolved but
        for the number of KV blocks."""
        config, length = self._config.scheduler, self._config.max_model_len
        assert length is not None
        resolved = config.resolve(self._stages, -(-length // config.block_size), length)
        self.executor.reserve(resolved)
        return resolved

    def room(self) -> int:
        """Bytes for KV blocks beside what is in use, weights and edges say, the largest step and
        graphs. To be called behind `reserve`, with the edges open."""
        block_size = self._config.scheduler.block_size
        share = self._config.gpu_memory_utilization
        return self.executor.room(share, block_size, self._graph_rows) // self._sharing

    def record_graphs(self) -> None:
        """Compile kernels and record decodes; the log tells how far it is."""
        log.info("compiling kernels")
        self.executor.warm_up()
        self.executor.record_graphs(
            self._graph_rows, lambda done, all_: log.info("graph %d/%d", done, all_)
        )
        self._counter = CompilationCounter()

    @property
    def compilations(self) -> int:
        """Kernels compiled since the stage is ready; 0 before."""
        return 0 if self._counter is None else self._counter.count

    @property
    def _graph_rows(self) -> int:
        """Of the largest graph."""
        return min(self._config.scheduler.max_num_seqs, MOST_ROWS)
