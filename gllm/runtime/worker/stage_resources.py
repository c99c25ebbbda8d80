"""Resources of a stage instance: weights, edges, groups of ranks, KV cache and threads.

They are loaded, opened and allocated on threads, while the event loop runs. `free` may be called at
any moment. `StageLoader` loads the weights, or takes them from an earlier instance.
"""

import gc
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import CopyKvBlocks, KvBlocksCopied
from gllm.messages.lifecycle import StageLoaded
from gllm.messages.steps import GrammarReady, StepDone
from gllm.models.config import ModelConfig, read_config
from gllm.models.identity import hash_model, hash_numerics
from gllm.models.large_pages import find_weight_pages, move_pages
from gllm.observability.process_memory import trim_memory
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.device import (
    available_memory_bytes,
    count_gpus,
)
from gllm.runtime.worker.executor import DeviceBackend, Executor, WeightMemoryError
from gllm.runtime.worker.kv_file import KvFile
from gllm.runtime.worker.stage import StageRunner
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.intact_slots import NO_SLOTS
from gllm.transport.base import EdgeClosedError, EdgeLayout, Receiver, Sender
from gllm.transport.groups import StageGroups, open_groups
from gllm.transport.region import RegionLayout
from gllm.transport.registry import join_senders, open_edges

log = logging.getLogger(__name__)

NICENESS = 10
"""Priority of threads that work beside steps, so that these go on undisturbed."""
PREPARED_SHARE = 0.9
"""Share of the available memory for layers that are loaded while other layers compute."""


class LoadCancelledError(Exception):
    """Loading was cancelled because the weights are no longer needed."""


class StageLoader:
    """Loads the weights of a stage on a thread, and hands them to the next stage of this process.

    The weights stay in memory over a recovery: the next loader takes over the layers that it needs,
    after waiting for them if they are still being loaded. Layers of a planned change are loaded
    while the present stage computes, and share its layers.
    """

    backend: DeviceBackend
    """Known once the executor is loaded."""

    def __init__(
        self,
        assignment: StageAssignment,
        on_progress: Callable[[int, int], None],
        previous: "Sequence[StageLoader]" = (),
        running: "StageLoader | None" = None,
    ) -> None:
        """Create a loader that has not started.

        Args:
            assignment: assignment of the stage.
            on_progress: called on the loading thread with the bytes loaded and in total.
            previous: loaders of a closed instance and of layers that were prepared for this one,
                whose layers are reused.
            running: loader of the instance that computes meanwhile, with which layers are shared.
        """
        self._assignment = assignment
        self._on_progress = on_progress
        self._previous = list(previous)
        self._running = running
        self._is_cancelled = False
        self._has_loaded = False
        self._small_pages: list[int] = []
        """Pages of the weights that are to be moved to large pages once the stage serves."""
        self._thread: threading.Thread | None = None

    @property
    def executor(self) -> Executor:
        """Executor of the stage."""
        return self.backend.executor

    def start(
        self, on_loaded: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Start the thread.

        Args:
            on_loaded: called on the thread with the weights in memory.
            on_error: called on the thread with an error of loading or of `on_loaded`.
        """

        def run() -> None:
            try:
                self._load()
                on_loaded()
            except LoadCancelledError:
                return
            except BaseException as error:
                on_error(error)

        self._thread = threading.Thread(target=run, name="load", daemon=True)
        self._thread.start()

    def close_executor(self) -> None:
        """Free everything but the weights; weights that are being loaded go on loading."""
        if self._has_loaded:
            self.executor.close()

    def _load(self) -> None:
        """Load the weights.

        Raises:
            ModelError: the folder does not have them.
            FieldError: weights, KV cache or attention cannot be as configured.
            LoadCancelledError: the weights are no longer needed.
        """
        assignment = self._assignment
        folder, num_gpus = Path(assignment.model_folder), count_gpus(assignment.config.device)
        previous, running = self._wait_for_previous(), self._find_running()
        limit_bytes = math.inf
        if assignment.replaceable:
            # A standby worker maps what costs no memory.
            limit_bytes = 0.0
        elif assignment.change:
            limit_bytes = limit_prepared_bytes(assignment, num_gpus)
        if running is None:
            # This module imports no torch.
            from gllm.kernels.threads import set_num_threads

            set_num_threads(assignment.num_threads)
        model = read_config(folder, assignment.config.hf_overrides)
        backend = create_backend(assignment, model, num_gpus)
        if not assignment.change:
            backend.executor.log_choices()
        backend.executor.load(folder, self._report_progress, previous, running, limit_bytes)
        if backend.executor.has_packed_weights:
            stage = backend.executor.stage
            self._small_pages = find_weight_pages(stage.parts, stage.ranks)
            if not assignment.restart_cause:
                move_pages(self._small_pages)
                self._small_pages = []
        self.backend = backend
        self._has_loaded = True

    def move_weights(self) -> None:
        """Move the weights that a recovery has packed to large pages, on a thread beside the steps.

        A start moves them before it serves. In a recovery requests wait, and moving may take longer
        than packing.
        """
        pages, self._small_pages = self._small_pages, []
        if not pages:
            return

        def run() -> None:
            # Of this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            move_pages(pages)

        threading.Thread(target=run, name="large-pages", daemon=True).start()

    def _find_running(self) -> Executor | None:
        """Return the executor that computes meanwhile, with its weights; None without one."""
        running, self._running = self._running, None
        return running.executor if running is not None and running._has_loaded else None

    def _wait_for_previous(self) -> list[Executor]:
        """Return the executors of the previous loaders, once these have loaded."""
        previous, self._previous = self._previous, []
        executors = [self._wait_for(instance) for instance in previous]
        return [executor for executor in executors if executor is not None]

    def _wait_for(self, previous: "StageLoader") -> Executor | None:
        """Return the executor of a previous loader once it has loaded; None without weights."""
        if previous._assignment.layers != self._assignment.layers:
            previous._is_cancelled = True
        previous._on_progress = self._report_progress
        if previous._thread is not None:
            previous._thread.join()
        if not previous._has_loaded:
            return None
        executor = previous.executor
        del previous.backend
        return executor

    def _report_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Report progress.

        Raises:
            LoadCancelledError: the weights are no longer needed.
        """
        if self._is_cancelled:
            raise LoadCancelledError
        self._on_progress(done_bytes, total_bytes)


def limit_prepared_bytes(assignment: StageAssignment, num_gpus: int) -> float:
    """Return the bytes of layers that may be loaded while another stage still computes.

    Args:
        assignment: stage whose layers are loaded in advance.
        num_gpus: GPUs to use.

    Raises:
        WeightMemoryError: the stage is on a GPU, whose memory the present stage uses.
    """
    if num_gpus:
        raise WeightMemoryError("a GPU loads its layers when its present stage has ended")
    return PREPARED_SHARE * available_memory_bytes() / assignment.num_local_workers


def create_backend(
    assignment: StageAssignment, model: ModelConfig, num_gpus: int, layers: range | None = None
) -> DeviceBackend:
    """Create the device backend of a stage: emulated, CUDA if there are GPUs to use, or CPU.

    Only the chosen backend is imported.

    Args:
        assignment: stage and options of the worker.
        model: configuration of the checkpoint.
        num_gpus: GPUs to use.
        layers: layers to compute instead of the assigned ones, to measure speeds; None for the
            assigned ones.

    Raises:
        FieldError: weights, KV cache or attention cannot be as configured.
    """
    layers = range(*assignment.layers) if layers is None else layers
    if assignment.config.is_emulated:
        from gllm.runtime.worker.emulated.backend import EmulatedBackend

        return EmulatedBackend(assignment, model, layers)
    if num_gpus:
        from gllm.runtime.worker.cuda.backend import CudaBackend

        return CudaBackend(assignment, model, num_gpus, layers)
    from gllm.runtime.worker.cpu.executor import CpuExecutor

    executor = CpuExecutor(
        model,
        assignment.config,
        assignment.num_stages,
        layers,
        rank=assignment.rank,
        num_ranks=assignment.num_ranks,
    )
    return DeviceBackend(assignment, executor)


class StageResources:
    """Weights, connections, KV cache and threads of a stage; opened on threads and freed together.

    The weights stay in memory for the next stage of this process.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        on_progress: Callable[[int, int], None],
        on_error: Callable[[BaseException], None],
        previous: "StageResources | None" = None,
        prepared: Sequence[StageLoader] = (),
    ) -> None:
        """Create the resources of an instance that has not been loaded.

        Args:
            assignment: its descriptors belong to the resources from now on.
            on_progress: called on the loading thread with the bytes loaded and in total.
            on_error: called on any thread with the error that ends the stage.
            previous: resources of a closed instance, whose weights are reused.
            prepared: layers that were loaded for this instance, or for one of several stages; None
                for none.
        """
        self.runner: StageRunner | None = None
        """Threads that compute and sample, once they are started."""
        self.kv_layout: KvLayout | None = None
        """Layout of the KV cache, once it is allocated in memory that other processes map."""
        self.intact = NO_SLOTS
        """Slots of the earlier worker's KV blocks that the cache begins with."""
        self._assignment = assignment
        self._on_error = on_error
        loaders = [*prepared, *([] if previous is None else [previous.loader])]
        self.loader: StageLoader = StageLoader(assignment, on_progress, loaders)
        """Has the weights, which outlive the resources."""
        self._lock = threading.Lock()
        """Held while edges, groups, caches and threads begin or end."""
        self._is_cancelled = self._is_freed = False
        self._edges: tuple[list[Receiver], list[Sender]] = ([], [])
        """Receivers and senders of the lanes."""
        self._groups: StageGroups | None = None
        self._copying: ThreadPoolExecutor | None = None
        """Thread that copies KV blocks of a device; None where other processes map the cache."""

    @property
    def backend(self) -> DeviceBackend:
        """Device of the stage, once the weights are loaded."""
        return self.loader.backend

    @property
    def executor(self) -> Executor:
        """Executor of the stage, once the weights are loaded."""
        return self.loader.executor

    @property
    def keeps_kv_cache(self) -> bool:
        """True if the KV cache is in a file that outlives this worker."""
        return self.executor.kv_file is not None

    def load(self, on_loaded: Callable[[StageLoaded], None]) -> None:
        """Load the weights and open edges and groups on a thread.

        on_loaded: called on that thread, unless the resources are cancelled before.
        """
        self.loader.start(lambda: self._on_weights(on_loaded), self._on_error)

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int = 0) -> None:
        """Allocate the KV cache and compile kernels; called on a thread, as it can take minutes."""
        with self._lock:
            if self._is_cancelled:
                return
            executor, kv_memory = self.executor, self._assignment.kv_memory
            executor.bind_thread()
            sizes = num_blocks, block_size
            try:
                executor.kv_file = self._open_kv_file(*sizes, num_state_slots)
                executor.allocate(*sizes, kv_memory, num_state_slots)
            except OSError as error:
                log.warning(
                    "KV blocks cannot outlive this worker, so that they are computed again after "
                    "its death (%s): raise the limits of file size and address space (ulimit -f, "
                    "ulimit -v)",
                    error.strerror,
                )
                executor.kv_file = None
                executor.allocate(*sizes, kv_memory, num_state_slots)
            if executor.kv_file is not None:
                self.intact = executor.kv_file.find_intact_slots(self._assignment.num_threads)
            if kv_memory is not None:
                folder = Path(self._assignment.model_folder)
                model = hash_numerics(hash_model(folder), executor.kv_numerics)
                self.kv_layout = executor.describe_kv_cache(model)
                is_pushed = self._assignment.config.scheduler.push_threshold is not None
                if is_pushed or executor.num_staging_blocks:
                    executor.share_layer_progress(kv_memory, self.kv_layout)
                if executor.num_staging_blocks:
                    self._copying = ThreadPoolExecutor(1, "kv-copies", executor.bind_thread)
            self.backend.prepare_steps()

    def _open_kv_file(
        self, num_blocks: int, block_size: int, num_state_slots: int
    ) -> KvFile | None:
        """Open the file of the KV cache that outlives this worker; None if there is none.

        The states of recurrent layers are not kept, so that the blocks would be of no use.

        Raises:
            OSError: the file cannot have the size.
        """
        assignment, executor = self._assignment, self.executor
        if assignment.kv_file is None or num_state_slots or not executor.can_keep_kv_cache:
            return None
        begin, end = assignment.layers
        place = f"rank {assignment.rank} of {assignment.num_ranks}"
        description = f"layers {begin} to {end}, {place}; {executor.kv_numerics}"
        if executor.draft_description:
            description = f"{description}; {executor.draft_description}"
        return KvFile(assignment.kv_file, description, num_blocks, block_size)

    def start_threads(
        self,
        on_result: Callable[[StepDone | GrammarReady], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Start the threads that compute and sample; called on the event loop, as both callbacks.

        Args:
            on_result: called with the messages for the driver.
            on_error: called with the error that ends the stage.
        """
        self.executor.bind_thread()
        config = self._assignment.config
        self.runner = StageRunner(
            self.executor,
            *self._edges,
            on_result,
            on_error,
            config.debug_step_seconds,
            config.slowdown_of(self._assignment.stage),
            self._groups,
        )
        self.loader.move_weights()

    def copy_kv_blocks(
        self, command: CopyKvBlocks, on_copied: Callable[[KvBlocksCopied], None]
    ) -> None:
        """Copy KV blocks of a device, after the copies before.

        Args:
            command: blocks and their staging blocks.
            on_copied: called on the copying thread.
        """
        assert self._copying is not None, "only devices copy KV blocks"
        self._copying.submit(self._copy, command, on_copied)

    def _copy(self, command: CopyKvBlocks, on_copied: Callable[[KvBlocksCopied], None]) -> None:
        try:
            self.executor.copy_kv_blocks(command)
        except BaseException as error:
            self._on_error(error)
            return
        on_copied(KvBlocksCopied(command.number))

    def cancel(self) -> None:
        """Cancel a start: it opens, allocates and reports nothing more; call `free` next."""
        self._is_cancelled = True

    def free(self) -> None:
        """Free everything but the weights; blocks until a step that is being computed has ended.

        Weights that are being loaded go on loading, for the next instance.
        """
        with self._lock:
            if self._is_freed:
                return
            self._is_freed = True
            if self.runner is not None:
                self.runner.close()
                self.runner = None
            if self._copying is not None:
                self._copying.shutdown(wait=True, cancel_futures=True)
                self._copying = None
            for ends in self._edges:
                for end in ends:
                    end.close()
            self._edges = ([], [])
            self.loader.close_executor()
            for group in self._groups or ():
                group.close()
            self._groups = None
            self._assignment.close_descriptors()
        trim_memory()

    def _on_weights(self, on_loaded: Callable[[StageLoaded], None]) -> None:
        """Open edges and groups; called on the loading thread."""
        backend, executor = self.backend, self.executor
        # One that was closed meanwhile leaves the weights to its successor.
        with self._lock:
            if self._is_cancelled:
                return
            # Before the rest of the memory is divided: these take some, NCCL for example.
            scheduler = backend.reserve()
            try:
                self._edges = self._open_edges(scheduler)
            except EdgeClosedError:
                return
            if self._assignment.region is not None:
                self._groups = self._open_groups(scheduler)
                executor.join(self._groups)
        available_bytes = backend.available_bytes()
        trim_memory()
        # Loaded objects live as long as the process: the collector never has to visit them.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        on_loaded(
            StageLoaded(
                self._assignment.stage,
                executor.weight_bytes,
                executor.block_bytes,
                available_bytes,
                executor.keeps_weights,
                executor.numerics,
                available_memory_bytes() if available_bytes is None else None,
                executor.state_bytes,
            )
        )

    def _open_edges(self, scheduler: SchedulerConfig) -> tuple[list[Receiver], list[Sender]]:
        """Open the edges to the neighbours; on a GPU this waits for them.

        scheduler: resolved except for the number of KV blocks.
        """
        assert scheduler.max_in_flight is not None
        assert scheduler.max_num_batched_tokens is not None
        backend, executor = self.backend, self.executor
        # A rank may still finish a step that rank 0 has committed, but not the one before that:
        # all ranks meet before each step.
        num_late_steps = int(max(self._assignment.degrees) > 1)
        shape = EdgeLayout(
            scheduler.max_in_flight + num_late_steps,
            scheduler.max_num_batched_tokens,
            executor.activation_width,
            executor.dtype.itemsize,
            # This module imports no torch.
            str(executor.dtype) == "torch.bfloat16",
        )
        receivers, senders = open_edges(
            self._assignment.incoming,
            self._assignment.outgoing,
            backend.transport,
            shape,
            executor.dtype,
            backend.streams,
            self._on_error,
            self._assignment.config.trusted_network,
            lambda: self._is_cancelled,
        )
        if executor.is_last:
            return receivers, []
        lanes = range(scheduler.num_lanes)
        return receivers, [join_senders([edge[lane] for edge in senders]) for lane in lanes]

    def _open_groups(self, scheduler: SchedulerConfig) -> StageGroups:
        """Join the other ranks of the stage; on a GPU this waits for them.

        scheduler: resolved except for the number of KV blocks.
        """
        assignment, executor = self._assignment, self.executor
        assert assignment.region is not None, "the stage has one rank"
        assert scheduler.max_num_batched_tokens is not None
        model = executor.model
        layout = RegionLayout(
            scheduler.max_num_batched_tokens,
            model.hidden_size,
            -(-model.vocab_size // assignment.num_ranks) if executor.is_last else 0,
        )
        return open_groups(
            assignment.region,
            assignment.rank,
            assignment.num_ranks,
            layout,
            self.backend.collectives,
            self.backend.streams,
            self._on_error,
        )
