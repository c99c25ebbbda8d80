"""Loading of a stage's weights on a thread, or their transfer from an earlier instance."""

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gllm.config.engine import KV_TRANSFER_ON_GPU
from gllm.models.config import ModelConfig, read_config
from gllm.options.field_types import FieldError
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.backend import DeviceBackend
from gllm.runtime.worker.device import available_memory_bytes, count_gpus, set_num_threads
from gllm.runtime.worker.executor import Executor, WeightMemoryError

PREPARED_SHARE = 0.9
"""Share of the available memory that layers may take which are loaded beside other ones."""


class LoadCancelledError(Exception):
    """Nobody needs the weights that are being loaded."""


class StageLoader:
    """The weights of one instance of a stage.

    They outlive the instance: the loader of the next one takes them over, after waiting for them if
    they are still being loaded. Layers of a planned change are loaded while the instance before
    computes, and shared with it.
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
            assignment: of the stage.
            on_progress: called on the loading thread with the bytes loaded and in total.
            previous: of a closed instance, and of layers that were prepared for this one.
            running: of the instance that computes meanwhile, with which layers are shared.
        """
        self._assignment = assignment
        self._on_progress = on_progress
        self._previous = list(previous)
        self._running = running
        self._is_cancelled = False
        self._has_loaded = False
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
            LoadCancelledError: nobody needs them any more.
        """
        assignment = self._assignment
        folder, num_gpus = Path(assignment.model_folder), count_gpus(assignment.config.device)
        previous, running = self._wait_for_previous(), self._find_running()
        limit_bytes = math.inf
        if assignment.change:
            limit_bytes = limit_prepared_bytes(assignment, num_gpus)
        if running is None:
            set_num_threads(assignment.num_threads)
        backend = create_backend(assignment, read_config(folder), num_gpus)
        if not assignment.change:
            backend.executor.log_choices()
        backend.executor.load(folder, self._report_progress, previous, running, limit_bytes)
        self.backend = backend
        self._has_loaded = True

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
            LoadCancelledError: nobody needs the weights any more.
        """
        if self._is_cancelled:
            raise LoadCancelledError
        self._on_progress(done_bytes, total_bytes)


def limit_prepared_bytes(assignment: StageAssignment, num_gpus: int) -> float:
    """Return the memory for layers that are prepared beside stages that compute, in bytes.

    Args:
        assignment: of the stage that is prepared.
        num_gpus: GPUs to use.

    Raises:
        WeightMemoryError: the stage is on a GPU, whose memory the present stage has.
    """
    if num_gpus:
        raise WeightMemoryError("a GPU loads its layers when its present stage has ended")
    return PREPARED_SHARE * available_memory_bytes() / assignment.num_local_workers


def create_backend(
    assignment: StageAssignment, model: ModelConfig, num_gpus: int, layers: range | None = None
) -> DeviceBackend:
    """Create the backend of a stage: CUDA if there are GPUs to use, else CPU.

    Only the chosen backend is imported.

    Args:
        assignment: of the stage.
        model: of the checkpoint.
        num_gpus: GPUs to use.
        layers: in place of those of the assignment, for a probe.

    Raises:
        FieldError: weights, KV cache or attention cannot be as configured.
    """
    if num_gpus:
        if assignment.config.kv_transfer is not None:
            raise FieldError("kv_transfer", KV_TRANSFER_ON_GPU)
        from gllm.runtime.worker.cuda.backend import CudaBackend

        return CudaBackend(assignment, model, num_gpus, layers)
    from gllm.runtime.worker.cpu.backend import CpuBackend

    return CpuBackend(assignment, model, layers)
