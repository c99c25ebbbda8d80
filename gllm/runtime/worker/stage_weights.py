"""Weights of an executor: what it reads, and what it shares with other executors of its process.

The weights of a layer outlive the generations and stages that use them, so a change of layers reads
only those that the process does not have.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch

from gllm.models.loader import Checkpoint, Weights
from gllm.models.spec import ModelSpec
from gllm.models.stage import HeldParts, ModelStage, estimate_bytes, hold_parts
from gllm.runtime.worker.executor import Executor, WeightMemoryError
from gllm.runtime.worker.grammars import GuideFactory


class StageWeights:
    """Loaded part of a model; `BaseExecutor` computes with it."""

    model: ModelSpec
    layers: range
    dtype: torch.dtype
    device: torch.device
    has_sampler: bool
    weight_bytes: int = 0
    _rank: int
    _num_ranks: int
    _quantization: str
    _max_model_len: int
    _eos_ids: Sequence[int]
    _stage: ModelStage
    _folder: Path | None = None
    """Folder of the loaded weights."""
    _grammars: GuideFactory | None = None

    def load(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        previous: Sequence[Executor] = (),
        running: Executor | None = None,
        limit_bytes: float = math.inf,
    ) -> None:
        """See Executor."""
        sources = _find_loaded(previous)
        same = [each for each in sources if each._weights_key == self._key_in(folder)]
        if whole := next((each for each in same if each.layers == self.layers), None):
            self._stage = whole._stage
            on_progress(self._stage.weight_bytes, self._stage.weight_bytes)
        if self.has_sampler:
            self._take_grammars(same)
        beside = _find_loaded([running])
        same += [each for each in beside if each._weights_key == self._key_in(folder)]
        held = hold_parts([each._stage for each in same], self.layers, self.model.num_layers)
        # Before anything is read, because the memory may not suffice for both.
        for each in sources:
            each.release_weights()
        if whole is None:
            self._read_missing(folder, on_progress, held, limit_bytes)
        self.weight_bytes = self._stage.weight_bytes
        self._folder = folder
        # An executor that computes keeps its grammars until a successor takes them.
        has_grammars = any(each._grammars is not None for each in [self, *beside])
        if self.has_sampler and not has_grammars:
            self._grammars = GuideFactory(folder, self.model.vocab_size, self._eos_ids)

    def _read_missing(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        held: HeldParts,
        limit_bytes: float,
    ) -> None:
        """Read the parts of the stage that are not held; see `load`."""
        with Checkpoint(
            folder,
            self.dtype,
            self.model,
            self.layers,
            self.device,
            held_layers=held.layers,
            holds_ends=held.ends is not None,
        ) as checkpoint:
            if (needed := estimate_bytes(held, self.layers, checkpoint)) > limit_bytes:
                raise WeightMemoryError(
                    f"{needed / 2**20:.0f} MiB of weights are missing, and "
                    f"{limit_bytes / 2**20:.0f} MiB of memory are free for them"
                )
            checkpoint.report_to(on_progress)
            weights = Weights(checkpoint, quantization=self._quantization, ranks=held.ranks)
            # Tensors created beside the weights (rotary frequencies) belong on the device too.
            with self.device:
                model, max_len = checkpoint.model, self._max_model_len
                self._stage = ModelStage(model, weights, self.layers, max_len, held)
            checkpoint.check_all_read()

    @property
    def stage(self) -> ModelStage:
        """Modules of the stage, once the weights are loaded."""
        return self._stage

    @property
    def _weights_key(self) -> tuple[Hashable, ...]:
        """Everything that the weights in memory depend on, but for the layers."""
        return self._key_in(self._folder)

    def _key_in(self, folder: Path | None) -> tuple[Hashable, ...]:
        """Return the key of weights that are loaded from a folder."""
        return (
            type(self).__name__,
            self.device,
            self._rank,
            self._num_ranks,
            self.dtype,
            self._quantization,
            self._max_model_len,
            folder,
        )

    def _take_grammars(self, sources: Sequence["StageWeights"]) -> None:
        """Take the compiled grammars of a closed executor."""
        for each in sources:
            if each._grammars is not None:
                self._grammars, each._grammars = each._grammars, None
                return

    def release_weights(self) -> None:
        """Free the weights and end the threads of grammars."""
        if self._folder is not None:
            del self._stage
            self._folder = None
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None


def _find_loaded(executors: Sequence[object]) -> list[StageWeights]:
    """Return the executors that have weights."""
    return [each for each in executors if isinstance(each, StageWeights) and each._folder]
