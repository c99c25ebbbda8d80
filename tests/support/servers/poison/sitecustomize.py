"""Make a worker die at a given token: the fault that test_recovery.py injects.

Python imports this module at the start of every process whose PYTHONPATH has this folder. A request
is poison if its logit bias has POISON_TOKEN; the worker that samples its token number FATAL_INDEX
is killed. Everything else is as without this module.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "gllm.runtime.worker.sampling"
POISON_TOKEN = 33
FATAL_INDEX = 4


class SamplingPatcher(importlib.abc.MetaPathFinder):
    """Patches the module of sampling when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            build = module.build_sampling_metadata

            def die_or_build(sequences: Any, states: Any, output_indices: Any) -> Any:
                die_of_poison(states, output_indices)
                return build(sequences, states, output_indices)

            module.build_sampling_metadata = die_or_build

        loader.exec_module = execute_and_patch
        return spec


def die_of_poison(states: Any, output_indices: Any) -> None:
    """Kill this process if a row is the fatal token of a poison request."""
    for state, index in zip(states, output_indices, strict=True):
        if index == FATAL_INDEX and POISON_TOKEN in state.params.logit_bias:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, SamplingPatcher())
