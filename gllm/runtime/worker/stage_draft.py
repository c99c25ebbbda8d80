"""Draft of a stage's executor: its weights, which executors hand on, and its KV cache."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gllm.models.draft import DraftModel, load_draft
from gllm.models.draft_plan import DraftPlan
from gllm.models.stage import ModelStage
from gllm.runtime.worker.batch import plan_windows
from gllm.runtime.worker.kv_cache import KVCache
from gllm.runtime.worker.stage_drafter import DraftCache, StageDrafter


class StageDraft:
    """Draft of one executor.

    Args:
        plan: which weights draft.
        backend: attention backend of their layers.
        dtype: of weights and activations.
    """

    def __init__(self, plan: DraftPlan, backend: str, dtype: torch.dtype) -> None:
        self._plan = plan
        self._backend = backend
        self._dtype = dtype
        self.model: DraftModel | None = None
        """Loaded weights."""
        self.drafter: StageDrafter | None = None
        """Computes drafts with them, once there is a KV cache."""

    @property
    def needs_hidden(self) -> bool:
        """True if the draft reads the hidden states of the served model."""
        return self.model is not None and self.model.needs_hidden

    @property
    def description(self) -> str:
        """Text with the layers whose keys and values the draft has."""
        return f"draft of {self._plan.folder or 'the model'}, {self._plan.layers}"

    def take(self, sources: Iterable["StageDraft"]) -> None:
        """Take the weights of the draft of a closed executor."""
        source = next((each for each in sources if each.model is not None), None)
        if source is not None:
            self.model, source.model = source.model, None

    def load(
        self, folder: Path, quantization: str, max_model_len: int, served: ModelStage | None
    ) -> None:
        """Load the weights; for the arguments see `load_draft`."""
        self.model = load_draft(
            self._plan, folder, self._dtype, quantization, max_model_len, served
        )

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None,
        vocab_size: int,
    ) -> None:
        """Allocate the KV cache, if the weights are loaded.

        Args:
            num_blocks: usable blocks, those of the served model.
            block_size: tokens per block.
            cache_dtype: of keys and values.
            zeros: as for KVCache.
            vocab_size: number of tokens of the served model.
        """
        if self.model is None:
            return
        specs = self._plan.layer_specs
        cache = KVCache(specs, num_blocks, block_size, cache_dtype, zeros)
        windows = frozenset(layer.attention.window for layer in specs)
        plan = partial(plan_windows, dtype=self._dtype, windows=windows, backend=self._backend)
        draft_cache = DraftCache(cache.layers, block_size, num_blocks, plan)
        self.drafter = StageDrafter(self.model, draft_cache, vocab_size)

    def close(self) -> None:
        """Free the KV cache and the memory of steps."""
        if self.model is not None:
            self.model.release_workspace()
        self.drafter = None
