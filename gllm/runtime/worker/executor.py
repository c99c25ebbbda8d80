"""Interface of a worker's executor: weights, KV cache and the computation of micro-batches.

`gllm.runtime.worker.cpu.executor` and `gllm.runtime.worker.cuda.executor` implement it;
`gllm.runtime.worker.base_executor` has what they share.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from gllm.messages.kv_layout import KvLayout
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import RegisterSequences
from gllm.models.spec import ModelSpec
from gllm.runtime.worker.batch import Batch
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.groups import StageGroups

if TYPE_CHECKING:
    from gllm.transport.device_streams import DeviceRuntime, DeviceStream


class WeightMemoryError(Exception):
    """There is not enough memory for weights beside those of a running stage."""


class DeviceTime(NamedTuple):
    """Seconds that a device took for a step, by its own clock."""

    elapsed: float
    """From the first operation to the last."""
    busy: float
    """Without the time in which the device waited, for grammar masks for example."""


class Executor(Protocol):
    """Model part and KV cache of one rank of a stage.

    A worker calls `prepare` on one thread, `compute` on a second and `sample` on a third, each in
    the order of steps. Each step's state is in its Batch.
    """

    is_asynchronous: bool
    """True if `compute` only queues work on a device; `wait` then waits for it."""
    keeps_weights: bool
    """True if `load` can take over the weights of a closed executor in the same process."""
    is_first: bool
    """True on the first stage."""
    is_last: bool
    """True on the last stage."""
    has_sampler: bool
    """True on rank 0 of the last stage, which samples."""
    model: ModelSpec
    """With the sizes of this rank."""
    layers: range
    """Layers of this stage."""
    dtype: torch.dtype
    """Type of activations and arithmetic."""
    weight_bytes: int
    """Bytes of the loaded weights."""
    block_bytes: int
    """Bytes of one KV block over the stage's layers, for the KV heads of this rank."""

    @property
    def numerics(self) -> str:
        """See StageLoaded; once the weights are loaded."""

    @property
    def kv_numerics(self) -> str:
        """Part of `numerics` that decides the numbers in the KV cache but for their rounding.

        Neither ranks nor choices by measurement belong to it: they change the order of sums.
        """

    def log_choices(self) -> None:
        """Log what was chosen for the stage: attention backend, dtypes, kernels."""

    def load(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        previous: "Sequence[Executor]" = (),
        running: "Executor | None" = None,
        limit_bytes: float = math.inf,
    ) -> None:
        """Load the stage's weights, but for the layers that this process holds.

        Args:
            folder: of the model.
            on_progress: called with the bytes read and the bytes in total.
            previous: executors of this process that are closed or never computed. Their layers
                that this stage has are taken over, the others freed.
            running: executor of this process that computes meanwhile, and shares its layers.
            limit_bytes: memory for layers that have to be read.

        Raises:
            ModelError: the folder does not have the weights.
            WeightMemoryError: the layers that have to be read take more than `limit_bytes`.
        """

    def join(self, groups: StageGroups) -> None:
        """Compute together with the other ranks of the stage, until `close`.

        Called with the weights loaded, before `allocate`; not at all where a stage has one rank.
        """

    def allocate(self, num_blocks: int, block_size: int, kv_memory: int | None = None) -> None:
        """Allocate the KV cache.

        Args:
            num_blocks: usable blocks.
            block_size: tokens per block.
            kv_memory: descriptor of an empty file for it; None for own memory.

        Raises:
            FieldError: the file cannot have that size, or the device has memory of its own.
        """

    def describe_kv_cache(self, model: str) -> KvLayout:
        """Return the layout of the KV cache, which is allocated in a file.

        model: see KvLayout.
        """

    def count_layers(self, kv_memory: int, layout: KvLayout) -> None:
        """Count the layers of each step from now on, for other engines that fetch them.

        Args:
            kv_memory: descriptor of the file of the KV cache, as in `allocate`.
            layout: of the KV cache.

        Raises:
            OSError: the file cannot be larger by a page.
        """

    def register(self, message: RegisterSequences) -> "Future[bytes] | None":
        """Register sequences that later plans name.

        Returns:
            A future that completes when the grammar is compiled; None without a grammar. It fails
            for a request that cannot be sampled: its rows are then sampled with default parameters,
            so that they disturb no others, and the driver has to end it.
        """

    def prepare(self, plan: StepPlan) -> Batch:
        """Build the micro-batch of a plan and free the sequences that the plan releases.

        The sequences are freed even if this raises; `fail_plan` has to be called then.

        Raises:
            KeyError: a sequence is not registered.
        """

    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Compute a micro-batch.

        Args:
            batch: the next one in the order of steps.
            hidden: activations [tokens, hidden] of the previous stage; None on the first stage.

        Returns:
            Activations [tokens, hidden] for the next stage; on the last stage a tensor for
            `sample`, of which ranks other than 0 have no row.

        Raises:
            GroupClosedError: another rank of the stage has ended or cancelled the groups.
        """

    def wait(self, batch: Batch) -> DeviceTime:
        """Wait until the device has computed the micro-batch; for asynchronous executors only."""

    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """Return the result of each sampling row, and details of the rows that return any.

        Has to be called for every batch of the executor that has the sampler.

        output: the tensor that `compute` returned; overwritten.
        """

    def fail_batch(self, batch: Batch, error: str) -> None:
        """Fail the grammars of a failed step, so that no later step waits for its tokens."""

    def fail_plan(self, plan: StepPlan, error: str) -> None:
        """Fail the grammars of a plan that could not be prepared."""

    def fail_sequences(self, error: str) -> None:
        """Fail the grammars of all sequences, so that no thread waits for one of them."""

    def close(self) -> None:
        """Free everything but the weights; no other method but `load` of a successor follows.

        The threads that computed and sampled have ended.
        """

    def bind_thread(self) -> None:
        """Select the executor's device on the calling thread, before it uses the executor."""


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
