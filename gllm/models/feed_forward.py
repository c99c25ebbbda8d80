"""Feed-forward modules with their weights: MLP, gated or not, and mixture of experts.

The arithmetic is in gllm/kernels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from gllm.kernels.activation import apply_activation, sigmoid, xielu
from gllm.kernels.experts import (
    Routing,
    StackedExperts,
    route,
    run_experts,
    run_stacked,
    stack_experts,
)
from gllm.kernels.gated_linear import ActivatedMatrix, GatedMatrix, gated_linear, prepare_gated
from gllm.kernels.linear import linear, prepare, scales_rows
from gllm.kernels.native.program import launch_host_function
from gllm.kernels.residual import scale
from gllm.kernels.weight_format import Matrix, dequantize_weight
from gllm.models.basic_layers import Linear, read_bias, read_matrices, read_matrix
from gllm.models.errors import ModelError
from gllm.models.host_experts import HostExperts
from gllm.models.loader import Weights
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.parts import LinearSpec


class MLP:
    """Feed-forward block: up projection, optionally gated, activation and down projection."""

    def __init__(self, spec: MLPSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.activation, self.output_scale = spec.activation, spec.output_scale
        self.up_proj: Linear | GatedMatrix
        if spec.is_gated:
            self.up_proj = read_gated(spec, weights, hidden_size)
        else:
            self.up_proj = Linear(spec.up_proj, weights, [spec.intermediate_size], hidden_size)
        self.down_proj = Linear(spec.down_proj, weights, [hidden_size], spec.intermediate_size)
        self.activation_weights: list[Tensor] | None = None
        if spec.activation_weights is not None:
            self.activation_weights = [
                weights.read_float32(name, 1) for name in spec.activation_weights
            ]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        out: as in `Linear`; `down_proj` writes to it.
        """
        if isinstance(self.up_proj, GatedMatrix):
            return scale(self.down_proj(gated_linear(x, self.up_proj), out), self.output_scale)
        inner = self.up_proj(x)
        if self.activation_weights is not None:
            return self.down_proj(xielu(inner, *self.activation_weights), out)
        return self.down_proj(apply_activation(self.activation, inner), out)


def read_gated(spec: MLPSpec, weights: Weights, hidden_size: int) -> GatedMatrix:
    """Read the gate and up projection of a gated MLP and prepare them for the fused kernel."""
    outputs = [spec.intermediate_size, spec.intermediate_size]
    parts = read_matrices(spec.up_proj, weights, outputs, hidden_size)
    if spec.gate_scale != 1:
        assert len(parts) == 2, "gate and up projection are separate"
        parts = [dequantize_weight(parts[0]) * spec.gate_scale, dequantize_weight(parts[1])]
    bias = read_bias(spec.up_proj, weights, outputs)
    fused = parts[0] if len(parts) == 1 else None
    halves = fused if isinstance(fused, Tensor) else parts
    return prepare_gated(halves, bias, spec.activation, weights.quantization)


SeparateExperts = tuple[Sequence[GatedMatrix | ActivatedMatrix], Sequence[Matrix], Tensor | None]
"""Gate and up projection of each expert, down projection of each, and the biases of the down
projections [experts, hidden]."""


def read_up_proj(
    spec: MLPSpec, weights: Weights, hidden_size: int
) -> GatedMatrix | ActivatedMatrix:
    """Read the up projection of an MLP, together with the gate projection if the MLP is gated."""
    if spec.is_gated:
        return read_gated(spec, weights, hidden_size)
    outputs = [spec.intermediate_size]
    matrix = read_matrix(spec.up_proj, weights, outputs, hidden_size)
    return ActivatedMatrix(matrix, read_bias(spec.up_proj, weights, outputs), spec.activation)


def read_separate_experts(
    experts: Sequence[MLPSpec], weights: Weights, hidden_size: int
) -> SeparateExperts:
    """Read the weights of MoE experts as one matrix per expert and projection."""
    gate_up = [read_up_proj(expert, weights, hidden_size) for expert in experts]
    down = [
        read_matrix(expert.down_proj, weights, [hidden_size], expert.intermediate_size)
        for expert in experts
    ]
    return gate_up, down, read_down_biases(experts, weights, hidden_size)


def read_down_biases(
    experts: Sequence[MLPSpec], weights: Weights, hidden_size: int
) -> Tensor | None:
    """Read the biases of the down projections, [experts, hidden]; None if this rank adds none.

    The ranks' outputs are added, so only the first one adds them.
    """
    biases = _stack(read_bias(expert.down_proj, weights, [hidden_size]) for expert in experts)
    is_first = experts[0].down_proj.columns is None or weights.ranks.rank == 0
    return biases if is_first else None


def _stack(biases: Iterable[Tensor | None]) -> Tensor | None:
    """Return the biases of all experts as one tensor; None without biases."""
    present = [bias for bias in biases if bias is not None]
    return torch.stack(present) if present else None


def read_stacked_experts(
    experts: Sequence[MLPSpec], weights: Weights, hidden_size: int
) -> StackedExperts:
    """Read the weights of MoE experts as one stacked tensor per projection.

    Raises:
        ModelError: the experts have different shapes or formats.
    """
    size, activation = experts[0].intermediate_size, experts[0].activation
    gate_up = (
        read_matrices(expert.up_proj, weights, [size, size], hidden_size) for expert in experts
    )
    down = (read_matrices(expert.down_proj, weights, [hidden_size], size) for expert in experts)
    try:
        return StackedExperts(
            stack_experts(len(experts), gate_up, weights.quantization),
            stack_experts(len(experts), down, weights.quantization),
            activation,
            _stack(read_bias(expert.up_proj, weights, [size, size]) for expert in experts),
            read_down_biases(experts, weights, hidden_size),
        )
    except ValueError as error:
        raise ModelError(f"{experts[0].up_proj.names[0]}: {error}") from error


class Experts:
    """Mixture of experts (MoE) block: router, experts and optionally a shared expert."""

    def __init__(self, spec: ExpertsSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        router_name = f"{spec.router.names[0]}.weight"
        router = weights.read_float32(router_name, spec.num_experts, hidden_size)
        if spec.router_scale is not None:
            factors = weights.read_float32(spec.router_scale, hidden_size)
            router = router * (factors * hidden_size**-0.5)
        self.router_bias: Tensor | None = None
        if spec.router.has_bias:
            self.router_bias = weights.read_float32(
                f"{spec.router.names[0]}.bias", spec.num_experts
            )
        # No BLAS: the experts selected for a token must not depend on its batch.
        self.router = prepare([router])
        self.correction_bias: Tensor | None = None
        if spec.correction_bias is not None:
            shape = (1, spec.num_experts) if spec.has_correction_row else (spec.num_experts,)
            self.correction_bias = weights.read_float32(spec.correction_bias, *shape).flatten()
        self.expert_scale: Tensor | None = None
        if spec.expert_scale is not None:
            self.expert_scale = weights.read_float32(spec.expert_scale, spec.num_experts)
        self.routing = Routing(**{each.name: getattr(spec, each.name) for each in fields(Routing)})
        experts = [expert_spec(spec.expert, index) for index in range(spec.num_experts)]
        self.experts: StackedExperts | SeparateExperts | HostExperts
        # GPU kernels read stacks; CPU kernels read matrices, each laid out separately.
        if spec.is_on_host:
            with weights.reading_to_host():
                separate = read_separate_experts(experts, weights, hidden_size)
            self.experts = HostExperts(*separate)
        elif router.is_cuda and spec.expert.is_gated:
            self.experts = read_stacked_experts(experts, weights, hidden_size)
        else:
            self.experts = read_separate_experts(experts, weights, hidden_size)
        self._ranks, self._is_summed = weights.ranks, spec.is_summed
        self._weighs_inputs = spec.weighs_inputs
        assert spec.top_k == 1 or not spec.weighs_inputs, "experts_spec refuses it"
        self.shared_expert: MLP | None = None
        if spec.shared_expert is not None:
            self.shared_expert = MLP(spec.shared_expert, weights, hidden_size)
        self.shared_expert_gate: Linear | None = None
        if spec.shared_expert_gate is not None:
            self.shared_expert_gate = Linear(
                spec.shared_expert_gate, weights, [1], hidden_size, is_exact=True
            )

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden].

        router_input: input of the router [tokens, hidden]; None for x.
        """
        return launch_host_function(self._run, x, x if router_input is None else router_input)

    def _run(self, x: Tensor, router_input: Tensor) -> Tensor:
        """Return the output; how many tokens each expert has depends on the step."""
        logits = linear(router_input.to(torch.float32), self.router, self.router_bias)
        expert_ids, expert_weights = route(logits, self.routing, self.correction_bias)
        if self.expert_scale is not None:
            expert_weights = expert_weights * self.expert_scale[expert_ids]
        out = self._ranks.layers.partial(*x.shape) if self._is_summed else None
        routed = x
        if self._weighs_inputs:
            routed, expert_weights = x * expert_weights.to(x.dtype), torch.ones_like(expert_weights)
        if isinstance(self.experts, HostExperts):
            return self.experts.run(
                routed, expert_ids, expert_weights, lambda: self._run_shared_expert(x)
            )
        if isinstance(self.experts, StackedExperts):
            result = run_stacked(routed, expert_ids, expert_weights, self.experts)
        else:
            reduce_magnitudes = None
            if self._is_summed and scales_rows(self.experts[1][0]):
                reduce_magnitudes = self._ranks.layers.maximum
            result = run_experts(
                routed, expert_ids, expert_weights, *self.experts, out, reduce_magnitudes
            )
        shared = self._run_shared_expert(x, out)
        if shared is not None:
            result = result + shared if out is None else result.add_(shared)
        return self._ranks.layers.sum(result, None, x.dtype) if self._is_summed else result

    def _run_shared_expert(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return the output [tokens, hidden] of the shared expert; None without one.

        out: sum of the routed experts, if ranks have parts of it; the result is like it.
        """
        if self.shared_expert is None:
            return None
        shared = self.shared_expert(x, None if out is None else torch.empty_like(out))
        if self.shared_expert_gate is not None:
            shared = shared * sigmoid(self.shared_expert_gate(x))
        return shared


def expert_spec(spec: MLPSpec, index: int) -> MLPSpec:
    """Return the spec of the expert with an index, with the index in its tensor names."""

    def with_index(linear_spec: LinearSpec) -> LinearSpec:
        return replace(linear_spec, names=tuple(name.format(index) for name in linear_spec.names))

    return replace(spec, up_proj=with_index(spec.up_proj), down_proj=with_index(spec.down_proj))
