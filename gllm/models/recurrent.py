"""Recurrent blocks with their weights, in place of attention: delta nets, Mamba, convolutions.

They read and update a state of fixed size per sequence. The arithmetic is in gllm/kernels.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gllm.kernels.activation import apply_activation, multiply, multiply_by_silu, sigmoid
from gllm.kernels.causal_conv import causal_conv
from gllm.kernels.gated_norm import gated_rms_norm
from gllm.kernels.linear_recurrence import linear_recurrence
from gllm.kernels.native.program import launch_host_function
from gllm.kernels.recurrence_inputs import (
    RecurrenceInputs,
    RecurrenceParameters,
    ScanInputs,
    ScanParameters,
)
from gllm.kernels.residual import add, scale
from gllm.kernels.selective_scan import selective_scan
from gllm.kernels.state_plan import StatePlan
from gllm.models.attention import Attention, ForwardContext, LayerCache
from gllm.models.basic_layers import Linear, Norm, optional_norm
from gllm.models.loader import Weights
from gllm.models.ranks import Ranks
from gllm.models.spec.layer import ParallelMixerSpec
from gllm.models.spec.recurrent import (
    ConvSpec,
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvSpec,
)


class CausalConv:
    """Causal depthwise convolution with its weights."""

    def __init__(self, spec: ConvSpec, weights: Weights, channels: int) -> None:
        """Read the weights, in float32."""
        each = channels // len(spec.names)
        parts = [weights.read_float32(f"{name}.weight", each, 1, spec.size) for name in spec.names]
        self.weight = torch.cat(parts)[:, 0].t().contiguous()
        """[size, channels] float32."""
        self.bias: Tensor | None = None
        if spec.has_bias:
            biases = [weights.read_float32(f"{name}.bias", each) for name in spec.names]
            self.bias = torch.cat(biases)
        self.activation = spec.activation

    def __call__(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the outputs [tokens, channels] of x [tokens, channels]; update the state."""
        return causal_conv(x, self.weight, self.bias, self.activation, state, plan)


class DeltaNet:
    """Gated delta net of one layer, with its projections and convolution.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), section
    3.3.
    """

    def __init__(self, spec: DeltaNetSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        in_orders: list[Tensor | None] = []
        gate_orders: list[Tensor | None] = []
        if spec.is_grouped_by_key_head:
            group = spec.num_heads // spec.num_key_heads
            sizes = spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim
            in_orders = [_order_by_part(spec.num_key_heads, sizes)]
            gate_orders = [_order_by_part(spec.num_key_heads, (group, group))]
        outputs = [2 * keys + values, values]
        self.in_proj = Linear(spec.in_proj, weights, outputs, hidden_size, in_orders)
        heads = [spec.num_heads, spec.num_heads]
        self.gate_proj = Linear(
            spec.gate_proj, weights, heads, hidden_size, gate_orders, is_exact=True
        )
        self.conv = CausalConv(spec.conv, weights, spec.num_channels)
        rates = weights.read_float32(spec.decay.name, spec.num_heads)
        bias = weights.read_float32(spec.decay_bias.name, spec.num_heads)
        self.parameters = RecurrenceParameters(
            -rates.exp(), bias.clone(), query_scale=spec.key_dim**-0.5, is_normalized=True
        )
        self.norm = Norm(spec.norm, weights, spec.value_dim)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], values)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        spec, plan = self.spec, context.state_plan
        conv_states, states = cache
        channels, keys = spec.num_channels, spec.num_key_heads * spec.key_dim
        projected, gates = self.in_proj(x), self.gate_proj(x)
        mixed = self.conv(projected[:, :channels], conv_states, plan)
        key_shape = len(x), spec.num_key_heads, spec.key_dim
        inputs = RecurrenceInputs(
            query=mixed[:, :keys].view(key_shape),
            key=mixed[:, keys : 2 * keys].view(key_shape),
            value=mixed[:, 2 * keys :].view(len(x), spec.num_heads, spec.value_dim),
            step=gates[:, spec.num_heads :],
            beta=gates[:, : spec.num_heads],
        )
        output = linear_recurrence(inputs, self.parameters, states, plan)
        normed = gated_rms_norm(output, projected[:, channels:], self.norm.weight, self.norm.eps)
        return self.out_proj(normed.flatten(1))


class KimiDelta:
    """Kimi delta attention of one layer, with its projections and convolution.

    Source: Kimi Team, "Kimi Linear" (2025), section 3.
    """

    def __init__(self, spec: KimiDeltaSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        heads, size, inner = spec.num_heads, spec.head_dim, spec.inner_size
        self.qkv_proj = Linear(spec.qkv_proj, weights, [inner] * 3, hidden_size)
        outputs, inputs = [heads], hidden_size
        if spec.is_compressed:
            outputs, inputs = [heads, size, size], size
        self.down_proj = Linear(spec.down_proj, weights, outputs, hidden_size, is_exact=True)
        self.decay_proj = Linear(spec.decay_proj, weights, [inner], inputs, is_exact=True)
        self.gate_proj = Linear(spec.gate_proj, weights, [inner], inputs)
        self.conv = CausalConv(spec.conv, weights, 3 * inner)
        rates = weights.read_float32(spec.decay.name, *spec.decay.shape(heads)).flatten()
        bias = weights.read_float32(spec.decay_bias.name, inner)
        self.parameters = RecurrenceParameters(
            *(-rates.exp(), bias.clone().view(heads, size)),
            query_scale=size**-0.5,
            is_normalized=True,
            decay_bound=spec.decay_bound,
        )
        self.norm = Norm(spec.norm, weights, size)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], inner)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        spec, plan = self.spec, context.state_plan
        conv_states, states = cache
        heads, size = spec.num_heads, spec.head_dim
        small = self.down_proj(x)
        decay = gate = x
        if spec.is_compressed:
            decay, gate = small[:, heads : heads + size], small[:, heads + size :]
        mixed = self.conv(self.qkv_proj(x), conv_states, plan).view(len(x), 3 * heads, size)
        query, key, value = mixed.split(heads, dim=1)
        step = self.decay_proj(decay).view(len(x), heads, size)
        inputs = RecurrenceInputs(query, key, value, step, beta=small[:, :heads])
        output = linear_recurrence(inputs, self.parameters, states, plan)
        normed = gated_rms_norm(
            output, self.gate_proj(gate), self.norm.weight, self.norm.eps, "sigmoid"
        )
        return self.out_proj(normed.flatten(1))


class Lightning:
    """Lightning attention of one layer, with its projections.

    Source: Qin et al., "Lightning Attention-2" (2024), section 3; MiniMax, "MiniMax-01" (2025),
    section 2.2.
    """

    def __init__(self, spec: LightningSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        heads, inner = spec.num_heads, spec.inner_size
        rows = torch.arange(3 * inner).view(heads, 3, spec.head_dim).transpose(0, 1).flatten()
        self.qkv_proj = Linear(spec.qkv_proj, weights, [3 * inner], hidden_size, [rows])
        self.gate_proj = Linear(spec.gate_proj, weights, [inner], hidden_size)
        self.norm = Norm(spec.norm, weights, inner)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], inner)
        self._ranks = weights.ranks
        rates = -torch.tensor(spec.slopes, device=self.norm.weight.device)
        # Every step is 1.
        self.parameters = RecurrenceParameters(
            rates, torch.zeros_like(rates), min_step=1.0, max_step=1.0
        )

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        spec, plan = self.spec, context.state_plan
        projected = apply_activation("silu", self.qkv_proj(x))
        heads = projected.view(len(x), 3, spec.num_heads, spec.head_dim)
        query, key, value = heads.unbind(1)
        inputs = RecurrenceInputs(query, key, value, projected[:, : spec.num_heads], beta=None)
        output = linear_recurrence(inputs, self.parameters, cache[0], plan)
        gate = self.gate_proj(x)
        if self._ranks.size > 1:
            normalize = partial(_normalize_over_ranks, self.norm, self._ranks, sigmoid, False, 0, 1)
            return self.out_proj(launch_host_function(normalize, output.flatten(1), gate))
        rows = output.view(len(x), 1, spec.inner_size)
        normed = gated_rms_norm(rows, gate, self.norm.weight, self.norm.eps, "sigmoid")
        return self.out_proj(normed.flatten(1))


class Mamba1:
    """Mamba block of one layer, with its projections and convolution.

    Source: Gu and Dao, "Mamba" (2023), section 3.
    """

    def __init__(self, spec: Mamba1Spec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        channels, size, rank = spec.num_channels, spec.state_size, spec.step_rank
        self.in_proj = Linear(spec.in_proj, weights, [2 * channels], hidden_size)
        self.conv = CausalConv(spec.conv, weights, channels)
        selected = [rank + 2 * size]
        self.selection_proj = Linear(
            spec.selection_proj, weights, selected, channels, is_exact=True
        )
        self.step_proj = Linear(spec.step_proj, weights, [channels], rank, is_exact=True)
        rates = weights.read_float32(spec.decay.name, channels, size)
        bias = weights.read_float32(spec.step_bias.name, channels)
        skip = weights.read_float32(spec.skip.name, channels)
        self.parameters = ScanParameters(-rates.exp().t().contiguous(), bias.clone(), skip.clone())
        self.norms: list[Norm] | None = None
        if spec.norms is not None:
            sizes = zip(spec.norms, (rank, size, size), strict=True)
            self.norms = [Norm(norm, weights, count) for norm, count in sizes]
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], channels)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        spec, plan = self.spec, context.state_plan
        conv_states, states = cache
        value, gate = self.in_proj(x).split(spec.num_channels, dim=1)
        value = self.conv(value, conv_states, plan)
        sizes = spec.step_rank, spec.state_size, spec.state_size
        parts = list(self.selection_proj(value).split(sizes, dim=1))
        if self.norms is not None:
            pairs = zip(self.norms, parts, strict=True)
            parts = [launch_host_function(norm, part) for norm, part in pairs]
        step, key, query = parts
        inputs = ScanInputs(value, self.step_proj(step), key, query)
        output = selective_scan(inputs, self.parameters, states, plan)
        return self.out_proj(multiply_by_silu(output, gate))


class Mamba2:
    """Mamba 2 block of one layer, with its projections and convolution.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 7.
    """

    def __init__(self, spec: Mamba2Spec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        inner = spec.inner_size
        outputs = inner + spec.num_channels + spec.num_heads
        self.in_proj = Linear(spec.in_proj, weights, [outputs], hidden_size)
        self.conv = CausalConv(spec.conv, weights, spec.num_channels)
        self.scales: Tensor | None = None
        """[outputs]: factors of the outputs of in_proj."""
        if spec.scales is not None:
            keys = spec.num_groups * spec.state_size
            sizes = torch.tensor([inner, inner, keys, keys, spec.num_heads])
            factors = torch.tensor(spec.scales).repeat_interleave(sizes)
            self.scales = factors.to(self.conv.weight.device, weights.dtype)
        rates, bias, skip = (
            weights.read_float32(vector.name, spec.num_heads).clone()
            for vector in (spec.decay, spec.step_bias, spec.skip)
        )
        self.parameters = RecurrenceParameters(
            -rates.exp(), bias, skip, spec.min_step, spec.max_step
        )
        self.norm = optional_norm(spec.norm, weights, inner)
        self._ranks = weights.ranks
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], inner)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        spec, plan = self.spec, context.state_plan
        conv_states, states = cache
        inner, keys = spec.inner_size, spec.num_groups * spec.state_size
        projected = self.in_proj(x)
        if self.scales is not None:
            projected = multiply(projected, self.scales.expand_as(projected))
        gate, channels, step = projected.split((inner, spec.num_channels, spec.num_heads), dim=1)
        mixed = self.conv(channels, conv_states, plan)
        key_shape = len(x), spec.num_groups, spec.state_size
        inputs = RecurrenceInputs(
            query=mixed[:, inner + keys :].view(key_shape),
            key=mixed[:, inner : inner + keys].view(key_shape),
            value=mixed[:, :inner].view(len(x), spec.num_heads, spec.head_dim),
            step=step,
            beta=None,
        )
        output = linear_recurrence(inputs, self.parameters, states, plan).view(len(x), inner)
        if self.norm is None:
            return self.out_proj(multiply_by_silu(output, gate))
        if spec.total_num_groups is not None:
            normalize = partial(
                _normalize_over_ranks,
                self.norm,
                self._ranks,
                partial(apply_activation, "silu"),
                spec.is_gated_first,
                spec.first_group,
                spec.total_num_groups,
            )
            return self.out_proj(launch_host_function(normalize, output, gate))
        groups = output.view(len(x), spec.num_groups, -1)
        weight = self.norm.weight.view(spec.num_groups, -1)
        normed = gated_rms_norm(
            groups, gate, weight, self.norm.eps, is_gated_first=spec.is_gated_first
        )
        return self.out_proj(normed.flatten(1))


class ParallelMixer:
    """Attention and a Mamba 2 block of one layer, whose outputs are added.

    Source: Zuo et al., "Falcon-H1" (2025), section 2.
    """

    def __init__(self, spec: ParallelMixerSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        self.attention = Attention(spec.attention, weights, hidden_size)
        self.recurrent = Mamba2(spec.recurrent, weights, hidden_size)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        The cache has keys and values, then the parts of the state.
        """
        attended = self.attention(x, context, cache[:2])
        mixed = self.recurrent(x, context, cache[2:])
        return add(
            scale(attended, self.spec.attention_scale), scale(mixed, self.spec.recurrent_scale)
        )


class ShortConv:
    """Gated short convolution of one layer.

    Source: Liquid AI, "LFM2 Technical Report" (2025), section 2.
    """

    def __init__(self, spec: ShortConvSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec, size = spec, spec.num_channels
        self.in_proj = Linear(spec.in_proj, weights, [3 * size], hidden_size)
        self.conv = CausalConv(spec.conv, weights, size)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], size)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        Updates the states in the cache.
        """
        gate, output_gate, value = self.in_proj(x).split(self.spec.num_channels, dim=1)
        mixed = self.conv(multiply(value, gate), cache[0], context.state_plan)
        return self.out_proj(multiply(mixed, output_gate))


def _normalize_over_ranks(
    norm: Norm,
    ranks: Ranks,
    activate: Callable[[Tensor], Tensor],
    is_gated_first: bool,
    group: int,
    num_groups: int,
    output: Tensor,
    gate: Tensor,
) -> Tensor:
    """Return the gated norm of outputs [tokens, n] whose group other ranks have parts of.

    The mean squares are those over all ranks.

    Args:
        norm: norm with this rank's part of the scale.
        ranks: the ranks of the stage.
        activate: activation of the gate.
        is_gated_first: True if the gate is applied before the norm.
        group: index of this rank's group.
        num_groups: number of groups of all ranks, each on as many ranks.
        output: [tokens, n] of this rank.
        gate: [tokens, n].
    """
    values = output.to(torch.float32)
    gates = activate(gate.to(torch.float32).contiguous())
    values = values * gates if is_gated_first else values
    squares = values.new_zeros(len(values), num_groups)
    # In float64, so that the order of the sums does not show.
    own = values.to(torch.float64).square().mean(dim=1) * num_groups / ranks.size
    squares[:, group] = own.to(torch.float32)
    means = ranks.layers.sum(squares, None, torch.float32)[:, group]
    normed = values * torch.rsqrt(means + norm.eps)[:, None] * norm.weight
    return (normed if is_gated_first else normed * gates).to(output.dtype)


def _order_by_part(num_groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Return the stored row of each output, part by part, of a weight stored group by group.

    Args:
        num_groups: number of groups.
        sizes: outputs of each part in a group.
    """
    rows = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
