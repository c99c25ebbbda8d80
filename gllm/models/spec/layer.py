"""A decoder layer: its blocks, their norms, and layers of no mixer or of two."""

from dataclasses import dataclass

from gllm.kernels.attention_window import AttentionWindow
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.entries import KVEntrySpec, StateEntrySpec
from gllm.models.spec.feed_forward import ExpertBranchSpec, ExpertsSpec, MLPSpec, PerLayerInputSpec
from gllm.models.spec.parts import NormSpec, RopeSpec
from gllm.models.spec.recurrent import Mamba2Spec, RecurrentSpec, UncachedMixerSpec


@dataclass(frozen=True)
class NoMixerSpec(UncachedMixerSpec):
    """Specification of a layer that has a feed-forward block only: it sees one token at a time."""

    num_heads: int = 1
    """The layer limits no number of ranks."""

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """None: the layer has no state."""
        return None

    def weights_per_token(self, hidden_size: int) -> int:
        """Return 0: there are no weights."""
        return 0


@dataclass(frozen=True)
class ParallelMixerSpec:
    """Specification of attention and a Mamba 2 block of one layer, whose outputs are added."""

    attention: AttentionSpec
    recurrent: Mamba2Spec
    attention_scale: float = 1.0
    """Factor of the output of attention."""
    recurrent_scale: float = 1.0
    """Factor of the output of the recurrent block."""

    @property
    def num_heads(self) -> int:
        """Query heads of attention."""
        return self.attention.num_heads

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary embedding of attention."""
        return self.attention.rope

    @property
    def window(self) -> AttentionWindow:
        """Window of attention."""
        return self.attention.window

    @property
    def kv_entry(self) -> KVEntrySpec:
        """KV cache entry of attention."""
        return self.attention.kv_entry

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """State of the recurrent block."""
        return self.recurrent.state_entry

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        blocks = self.attention, self.recurrent
        return sum(block.weights_per_token(hidden_size) for block in blocks)


SingleMixerSpec = AttentionSpec | LatentAttentionSpec | NoMixerSpec | RecurrentSpec
SequenceMixerSpec = SingleMixerSpec | ParallelMixerSpec
"""Specifications of the blocks of a layer that see more than one token."""


@dataclass(frozen=True)
class LayerSpec:
    """Specification of a decoder layer: attention, feed-forward block and norms."""

    attention: SequenceMixerSpec
    """Attention, or the recurrent block in its place."""
    mlp: MLPSpec | ExpertsSpec | None
    """Feed-forward block; None for a layer of attention or a recurrent block alone."""
    attention_norm: NormSpec | None
    """Norm before attention; None if attention reads the residual stream itself."""
    mlp_norm: NormSpec | None
    """Norm before `mlp`; None if `mlp` reads the residual stream itself, or in a parallel layer
    whose blocks share attention_norm."""
    post_attention_norm: NormSpec | None = None
    """Norm of attention's output before it is added."""
    post_mlp_norm: NormSpec | None = None
    """Norm of the feed-forward output before it is added."""
    is_parallel: bool = False
    """True if attention and `mlp` read the same residual stream."""
    stream_factors: tuple[float, float] | None = None
    """Factors of the norms before attention and `mlp`, which replace the residual stream; None if
    it stays."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and `mlp` before they are added."""
    experts: ExpertBranchSpec | None = None
    """Mixture of experts beside `mlp`."""
    per_layer_input: PerLayerInputSpec | None = None
    """Addend from the model's per-layer embedding."""
    scalar: str | None = None
    """Name of the tensor [1] by which the layer multiplies the residual stream in the end."""

    @property
    def mixers(self) -> tuple[SingleMixerSpec, ...]:
        """Blocks that see more than one token, one after the other."""
        if isinstance(self.attention, ParallelMixerSpec):
            return self.attention.attention, self.attention.recurrent
        return (self.attention,)

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        experts = self.experts.experts if self.experts else None
        blocks = (block for block in (self.attention, self.mlp, experts) if block is not None)
        return sum(block.weights_per_token(hidden_size) for block in blocks)
