"""Timer of tensor operations and compiled kernels, without the Python code between them."""

import ctypes
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

from gllm.kernels.native.library import KernelLibrary


class Operations:
    """A context that adds the time of every operation to `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mode = _Mode(self)
        self._call, self._run = KernelLibrary.__call__, KernelLibrary.run

    def __enter__(self) -> Self:
        call, run = self._call, self._run

        def timed_call(library: KernelLibrary, arguments: ctypes.Structure) -> None:
            self.time(lambda: call(library, arguments))

        def timed_run(library: KernelLibrary, calls: ctypes.c_void_p, count: int) -> None:
            self.time(lambda: run(library, calls, count))

        KernelLibrary.__call__ = timed_call  # type: ignore[method-assign, assignment]
        KernelLibrary.run = timed_run  # type: ignore[method-assign, assignment]
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        KernelLibrary.__call__ = self._call  # type: ignore[method-assign]
        KernelLibrary.run = self._run  # type: ignore[method-assign]

    def time(self, work: Callable[[], Any]) -> Any:
        """Run `work` and add its time."""
        begin = time.perf_counter()
        result = work()
        self.seconds += time.perf_counter() - begin
        return result


class _Mode(TorchDispatchMode):
    """A dispatch mode that times each operation after composite ones were decomposed."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operations.time(lambda: func(*args, **(kwargs or {})))
