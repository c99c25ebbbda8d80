"""A stage on a GPU, from its process's first moment to its first step.

Owns which GPU a stage gets, how stages on GPUs are joined, and the order of start-up. Knows nothing
of messages.
"""

import logging

from gllm.config import EngineConfig
from gllm.kernels.triton.compilations import CompilationCounter
from gllm.models.config import ModelConfig
from gllm.runtime.cuda.executor import DeviceExecutor
from gllm.streams import CudaQueues

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
        self.queues = CudaQueues(stage % count)
        self.executor = DeviceExecutor(model, config, stage, stages, layers, self.queues)
        self._config, self._stages = config, stages
        self._sharing = -(-stages // count)
        """Stages on this GPU, or one more."""
        self._counter: CompilationCounter | None = None
        self.transport = "nccl" if self._sharing == 1 else "host-staging"

    def room(self) -> int:
        """Bytes for KV blocks beside the weights, which are loaded, and the largest step."""
        config, length = self._config.scheduler, self._config.max_model_len
        assert length is not None
        blocks = -(-length // config.block_size)
        self.executor.reserve(config.resolve(self._stages, blocks, length))
        room = self.executor.room(self._config.gpu_memory_utilization, config.block_size)
        return room // self._sharing

    def record_graphs(self) -> None:
        """Compile kernels and record decodes; the log tells how far it is."""
        log.info("compiling kernels")
        self.executor.warm_up()
        most = min(self._config.scheduler.max_num_seqs, MOST_ROWS)
        self.executor.record_graphs(most, lambda done, all_: log.info("graph %d/%d", done, all_))
        self._counter = CompilationCounter()

    @property
    def compilations(self) -> int:
        """Kernels compiled since the stage is ready; 0 before."""
        return 0 if self._counter is None else self._counter.count
