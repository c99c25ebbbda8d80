"""Blocks with a state of fixed size instead of a KV cache: convolutions, delta nets and Mamba."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gllm.models.spec.entries import NO_KV_ENTRY, KVEntrySpec, StateEntrySpec, StatePartSpec
from gllm.models.spec.parts import DimensionShard, LinearSpec, NormSpec

DELTA_FLOPS = 7
"""FLOP per element of a delta rule: the decay, and a multiplication and an addition each for the
recalled value, the update and the output."""
SELECTIVE_FLOPS = 5
"""FLOP per element of a selective state update: the same without the recalled value."""


@dataclass(frozen=True)
class HeadVectorSpec:
    """Specification of a stored vector with one element for each head or channel."""

    name: str
    """Name of the tensor, complete."""
    rows: DimensionShard | None = None
    """Elements of this rank; None for all."""
    dimension: int = 0
    """Dimension of the tensor that has the elements; all others have size 1."""
    num_dimensions: int = 1

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of a tensor with this number of elements."""
        return tuple(count if i == self.dimension else 1 for i in range(self.num_dimensions))


@dataclass(frozen=True)
class ConvSpec:
    """Specification of a causal depthwise convolution over the tokens of a sequence."""

    names: tuple[str, ...]
    """Tensors of equal numbers of channels, which are concatenated."""
    size: int
    """Tokens per output, the current one included."""
    has_bias: bool = False
    activation: str | None = "silu"
    """Activation of the outputs, a name of gllm.kernels.activation; None for none."""
    rows: tuple[DimensionShard, ...] = ()
    """Channels of this rank, for each tensor name; empty for all channels."""

    def state_part(self, channels: int) -> StatePartSpec:
        """Return the part of a layer's state with the last inputs, oldest first."""
        flops_per_element = 2 * self.size / max(1, self.size - 1)
        return StatePartSpec("conv", (self.size - 1, channels), flops_per_element)

    @property
    def tensors(self) -> "tuple[HeadVectorSpec, ...]":
        """Stored tensors, which have one row for each channel."""
        kinds = ("weight", "bias") if self.has_bias else ("weight",)
        pairs = zip(self.names, self.rows or [None] * len(self.names), strict=True)
        return tuple(
            HeadVectorSpec(f"{name}.{kind}", rows) for name, rows in pairs for kind in kinds
        )


class UncachedMixerSpec:
    """Base of the blocks without a KV cache: they have neither rotary embedding nor window."""

    rope: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def kv_entry(self) -> KVEntrySpec:
        """No KV cache entry."""
        return NO_KV_ENTRY


@dataclass(frozen=True)
class DeltaNetSpec(UncachedMixerSpec):
    """Specification of a gated delta net: linear attention whose state is a matrix per head.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), section 3.
    """

    num_heads: int
    """Heads of values, of gates and of the state."""
    num_key_heads: int
    """Heads of queries and keys, each shared by neighbouring heads of values."""
    key_dim: int
    """Elements per query and key."""
    value_dim: int
    """Elements per value."""
    in_proj: LinearSpec
    """Projection to queries, keys, values and output gates."""
    gate_proj: LinearSpec
    """Projection to the update rate (beta) and the decay of each head."""
    conv: ConvSpec
    """Convolution of queries, keys and values."""
    decay: HeadVectorSpec
    """Logarithm of each head's decay rate, A_log."""
    decay_bias: HeadVectorSpec
    """Bias of each head's decay projection, dt_bias."""
    norm: NormSpec
    """Norm of each head's output, before the gate."""
    out_proj: LinearSpec
    is_grouped_by_key_head: bool = False
    """True if in_proj and gate_proj are stored key head by key head."""

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """Last inputs of the convolution, and a matrix [key_dim, value_dim] per head."""
        shape = self.num_heads, self.key_dim, self.value_dim
        matrices = StatePartSpec("delta", shape, DELTA_FLOPS)
        return StateEntrySpec((self.conv.state_part(self.num_channels), matrices))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        values = self.num_heads * self.value_dim
        outputs = self.num_channels + 2 * self.num_heads + 2 * values
        return outputs * hidden_size + self.num_heads * self.key_dim * self.value_dim

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return "linear_num_key_heads", self.num_key_heads

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state."""
        return self.in_proj, self.gate_proj

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each head or channel."""
        return self.decay, self.decay_bias, *self.conv.tensors


@dataclass(frozen=True)
class KimiDeltaSpec(UncachedMixerSpec):
    """Specification of a delta net with a decay for each element of each head's key.

    Decays and output gates are projected from the hidden state, or from compressions of it. Source:
    Kimi Team, "Kimi Linear" (2025), section 3.
    """

    num_heads: int
    head_dim: int
    """Elements per query, key and value, and of the compressions."""
    qkv_proj: LinearSpec
    """Projection to queries, keys and values."""
    down_proj: LinearSpec
    """Projection to the update rates (beta), and to the compressions of decays and output gates if
    there are any."""
    decay_proj: LinearSpec
    """Projection to decays."""
    gate_proj: LinearSpec
    """Projection to output gates."""
    conv: ConvSpec
    """Convolution of queries, keys and values."""
    decay: HeadVectorSpec
    """Logarithm of each head's decay rate, A_log."""
    decay_bias: HeadVectorSpec
    """Bias of each decay, dt_bias."""
    norm: NormSpec
    """Norm of each head's output, before the gate."""
    out_proj: LinearSpec
    decay_bound: float = 0.0
    """Bound of the logarithm of the decay, negative; 0 for none."""

    @property
    def is_compressed(self) -> bool:
        """True if decays and output gates are projected from compressions."""
        return len(self.down_proj.names) > 1

    @property
    def inner_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """Last inputs of the convolution, and a matrix [head_dim, head_dim] per head."""
        shape = self.num_heads, self.head_dim, self.head_dim
        matrices = StatePartSpec("delta", shape, DELTA_FLOPS)
        return StateEntrySpec((self.conv.state_part(3 * self.inner_size), matrices))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        inputs = self.head_dim if self.is_compressed else hidden_size
        outputs = 4 * self.inner_size + self.num_heads
        outputs += 2 * self.head_dim if self.is_compressed else 0
        # Of decays and gates, and the state.
        return outputs * hidden_size + (2 * inputs + self.head_dim) * self.inner_size

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return "linear_attn_config.num_heads", self.num_heads

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state and of its compressions."""
        return self.qkv_proj, self.down_proj, self.decay_proj, self.gate_proj

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each head or channel."""
        return self.decay, self.decay_bias, *self.conv.tensors


@dataclass(frozen=True)
class ShortConvSpec(UncachedMixerSpec):
    """Specification of a gated short convolution: out(c * conv(b * x)) of b, c, x = in(hidden).

    Source: Liquid AI, "LFM2 Technical Report" (2025), section 2.
    """

    num_channels: int
    in_proj: LinearSpec
    """Projection to b, c and x."""
    conv: ConvSpec
    out_proj: LinearSpec
    num_heads: int = 1
    """All channels are alike."""

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """Last inputs of the convolution."""
        return StateEntrySpec((self.conv.state_part(self.num_channels),))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        return 4 * self.num_channels * hidden_size

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return "hidden_size", self.num_channels

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state."""
        return (self.in_proj,)

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each channel."""
        return self.conv.tensors


@dataclass(frozen=True)
class LightningSpec(UncachedMixerSpec):
    """Specification of lightning attention: linear attention with a constant decay of each head.

    Source: Qin et al., "Lightning Attention-2" (2024), section 3; MiniMax, "MiniMax-01" (2025),
    section 2.2.
    """

    num_heads: int
    head_dim: int
    """Elements per query, key and value."""
    qkv_proj: LinearSpec
    """Projection to queries, keys and values, stored head by head."""
    gate_proj: LinearSpec
    """Projection to output gates."""
    norm: NormSpec
    """Norm of the outputs of all heads together, of all ranks, before the gates."""
    out_proj: LinearSpec
    slopes: tuple[float, ...]
    """Logarithm of 1 / decay of each head of this rank."""
    norm_rows: DimensionShard | None = None
    """Elements of the norm's scale of this rank; None for all."""

    @property
    def inner_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """A matrix [head_dim, head_dim] per head."""
        shape = self.num_heads, self.head_dim, self.head_dim
        return StateEntrySpec((StatePartSpec("linear", shape, SELECTIVE_FLOPS),))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        return (5 * hidden_size + self.head_dim) * self.inner_size

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return "num_attention_heads", self.num_heads

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state."""
        return self.qkv_proj, self.gate_proj

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each element of the heads."""
        return (HeadVectorSpec(f"{self.norm.name}.weight", self.norm_rows),)


@dataclass(frozen=True)
class Mamba1Spec(UncachedMixerSpec):
    """Specification of a Mamba block: a selective scan with a state of some elements per channel.

    Source: Gu and Dao, "Mamba" (2023), section 3.
    """

    num_channels: int
    state_size: int
    """Elements per channel, and per key and query."""
    step_rank: int
    """Elements of the compressed time steps."""
    in_proj: LinearSpec
    """Projection to values and gates (x, z)."""
    conv: ConvSpec
    """Convolution of values."""
    selection_proj: LinearSpec
    """Projection of values to compressed time steps, keys and queries (dt, B, C)."""
    step_proj: LinearSpec
    """Projection of the compression to time steps, without its bias."""
    step_bias: HeadVectorSpec
    """Bias of each channel's time step."""
    decay: HeadVectorSpec
    """Logarithm of the decay rate of each channel's elements, A_log [channels, state_size]."""
    skip: HeadVectorSpec
    """Factor of each channel's value in its output, D."""
    out_proj: LinearSpec
    norms: tuple[NormSpec, NormSpec, NormSpec] | None = None
    """Norms of compressed time steps, keys and queries; None for none."""
    num_heads: int = 1
    """All channels are alike."""

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """Last inputs of the convolution, and the elements of each channel."""
        elements = StatePartSpec("scan", (self.state_size, self.num_channels), SELECTIVE_FLOPS)
        return StateEntrySpec((self.conv.state_part(self.num_channels), elements))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        selected = 2 * self.step_rank + 3 * self.state_size
        return (3 * hidden_size + selected) * self.num_channels

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return "the number of Mamba's channels", self.num_channels

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state and of values."""
        return self.in_proj, self.selection_proj, self.step_proj

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each channel."""
        return self.decay, self.step_bias, self.skip, *self.conv.tensors


@dataclass(frozen=True)
class Mamba2Spec(UncachedMixerSpec):
    """Specification of a Mamba 2 block: a selective state update of a matrix per head.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 7.
    """

    num_heads: int
    num_groups: int
    """Groups of heads that share keys and queries (B and C)."""
    head_dim: int
    """Elements per head (of x)."""
    state_size: int
    """Elements per key and query."""
    in_proj: LinearSpec
    """Projection to gates, values, keys, queries and time steps (z, x, B, C, dt)."""
    conv: ConvSpec
    """Convolution of values, keys and queries."""
    decay: HeadVectorSpec
    """Logarithm of each head's decay rate, A_log."""
    step_bias: HeadVectorSpec
    """Bias of each head's time step, dt_bias."""
    skip: HeadVectorSpec
    """Factor of each head's value in its output, D."""
    norm: NormSpec | None
    """Norm of the gated outputs of each group; None for the gate alone."""
    out_proj: LinearSpec
    norm_rows: DimensionShard | None = None
    """Elements of the norm's scale of this rank; None for all."""
    is_gated_first: bool = True
    """True if the gate is applied before the norm."""
    scales: tuple[float, ...] | None = None
    """Factors of gates, values, keys, queries and time steps; None for 1."""
    min_step: float = 0.0
    max_step: float = math.inf
    """Limits of the time steps."""
    heads_key: str = "mamba_n_heads"
    groups_key: str = "mamba_n_groups"
    """Keys of config.json with the numbers of heads and of groups, for messages."""
    first_group: int = 0
    """Index of this rank's group among total_num_groups."""
    total_num_groups: int | None = None
    """Groups of all ranks, where several ranks have a part of one group's heads; else None."""

    @property
    def inner_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """Last inputs of the convolution, and a matrix [state_size, head_dim] per head."""
        shape = self.num_heads, self.state_size, self.head_dim
        matrices = StatePartSpec("ssm", shape, SELECTIVE_FLOPS)
        return StateEntrySpec((self.conv.state_part(self.num_channels), matrices))

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights and state elements that are read to compute one token."""
        outputs = 2 * self.inner_size + self.num_channels + self.num_heads
        return outputs * hidden_size + self.inner_size * self.state_size

    @property
    def divided_size(self) -> tuple[str, int]:
        """Name and value of the size of which each rank has an equal part."""
        return self.heads_key, self.num_heads

    @property
    def in_linears(self) -> tuple[LinearSpec, ...]:
        """Projections of the hidden state."""
        return (self.in_proj,)

    @property
    def vectors(self) -> tuple[HeadVectorSpec, ...]:
        """Tensors with one row for each head or channel."""
        scales = self.decay, self.step_bias, self.skip
        if self.norm is None:
            return *scales, *self.conv.tensors
        return (
            *scales,
            *self.conv.tensors,
            HeadVectorSpec(f"{self.norm.name}.weight", self.norm_rows),
        )


RecurrentSpec = (
    DeltaNetSpec | KimiDeltaSpec | LightningSpec | Mamba1Spec | Mamba2Spec | ShortConvSpec
)
"""Specifications of recurrent blocks, which have a state of fixed size instead of a KV cache."""
