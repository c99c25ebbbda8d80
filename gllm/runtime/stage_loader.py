"""Loading of a stage's weights on a thread, or their transfer from an earlier instance."""

import threading
from collections.abc import Callable
from pathlib import Path

from gllm.models.config import ModelConfig, read_config
from gllm.runtime.assignment import StageAssignment
from gllm.runtime.backend import DeviceBackend
from gllm.runtime.device import count_gpus, set_num_threads
from gllm.runtime.executor import Executor


class LoadCancelledError(Exception):
    """Nobody needs the weights that are being loaded."""


class StageLoader:
    """The weights of one instance of a stage.

    They outlive the instance: the loader of the next one takes them over, after waiting for them if
    they are still being loaded.
    """

    backend: DeviceBackend
    """Known once the executor is loaded."""

    def __init__(
        self,
        assignment: StageAssignment,
        on_progress: Callable[[int, int], None],
        previous: "StageLoader | None" = None,
    ) -> None:
        """Create a loader that has not started.

        Args:
            assignment: of the stage.
            on_progress: called on the loading thread with the bytes loaded and in total.
            previous: of a closed instance.
        """
        self._assignment = assignment
        self._on_progress = on_progress
        self._previous = previous
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
        folder, config = Path(assignment.model_folder), assignment.config
        previous = self._wait_for_previous()
        set_num_threads(assignment.num_threads)
        backend = create_backend(assignment, read_config(folder), count_gpus(config.device))
        backend.executor.log_choices()
        backend.executor.load(folder, self._report_progress, previous)
        self.backend = backend
        self._has_loaded = True

    def _wait_for_previous(self) -> Executor | None:
        """Return the executor of the previous instance once it has loaded; None without weights."""
        previous, self._previous = self._previous, None
        if previous is None:
            return None
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
        from gllm.runtime.cuda.backend import CudaBackend

        return CudaBackend(assignment, model, num_gpus, layers)
    from gllm.runtime.cpu.backend import CpuBackend

    return CpuBackend(assignment, model, layers)
