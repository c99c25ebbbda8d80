"""Blocks that see one token at a time: MLPs and mixtures of experts."""

from dataclasses import dataclass
from typing import Literal

from gllm.models.spec.parts import LinearSpec, NormSpec


@dataclass(frozen=True)
class MLPSpec:
    """Specification of a feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    intermediate_size: int
    activation: str
    """A name of gllm.kernels.activation."""
    up_proj: LinearSpec
    """Gate and up projection, in this order, if the block is gated."""
    down_proj: LinearSpec
    is_gated: bool = True
    gate_scale: float = 1.0
    """Factor of the gate before the activation."""
    output_scale: float = 1.0
    """Factor of the output."""
    activation_weights: tuple[str, str] | None = None
    """Names of the learned parameters of xIELU, each [1], for positive and negative elements."""

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        return (2 + self.is_gated) * hidden_size * self.intermediate_size


@dataclass(frozen=True)
class ExpertStacksSpec:
    """Tensors in which a family's own checkpoints store the projections of all experts of a layer.

    Each has the shape [experts, outputs, inputs]; the gates' outputs come first. Biases of all
    experts are in a tensor whose name ends with _bias, and MXFP4 weights in two tensors whose names
    end with _blocks and _scales.
    """

    up_proj: str
    """Full name, relative to the layer, of the gate and up projections."""
    down_proj: str
    is_transposed: bool = False
    """True if the shape is [experts, inputs, outputs], except in MXFP4."""
    is_interleaved: bool = False
    """True if outputs of gate and up projection alternate."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Specification of a mixture of experts (MoE): a router selects `top_k` experts per token."""

    num_experts: int
    top_k: int
    router: LinearSpec
    expert: MLPSpec
    """Each expert; tensor names have {} in place of its index."""
    scoring: Literal["softmax", "sigmoid", "sparse mixer"] = "softmax"
    """Function from the router's logits to scores."""
    jitter: float = 0.0
    """Width of the sparse mixer's ties: logits that are further below the best one get no share."""
    renormalize: bool = False
    """True if the weights of a token's experts are divided by their sum."""
    scaling_factor: float = 1.0
    """Factor of the experts' weights."""
    num_groups: int = 1
    top_k_groups: int = 1
    """Number of groups from which a token's experts are selected."""
    group_scoring: Literal["best", "best two"] = "best"
    """Score of a group: that of its best expert, or the sum of its best two."""
    correction_bias: str | None = None
    """Name of the tensor added to the scores for the selection, not for the weights."""
    selects_by_logits: bool = False
    """True if that tensor is added to the logits, by which the experts are selected."""
    has_correction_row: bool = False
    """True if that tensor is stored as [1, experts]."""
    weighs_inputs: bool = False
    """True if a token's weights scale the inputs of its experts, not their outputs."""
    stacks: ExpertStacksSpec | None = None
    """Tensors that hold the projections of all experts, if the checkpoint has no others."""
    router_scale: str | None = None
    """Name of the tensor [hidden] by which the router's inputs are multiplied, besides 1 /
    sqrt(hidden)."""
    expert_scale: str | None = None
    """Name of the tensor [experts] of factors of the experts' weights."""
    shared_expert: MLPSpec | None = None
    """MLP that computes every token."""
    shared_expert_gate: LinearSpec | None = None
    """Gate whose sigmoid scales the output of the shared expert."""
    is_summed: bool = False
    """True if the block's output, including the shared expert's, is summed over the ranks. The down
    projections inside are not summed on their own."""
    is_on_host: bool = False
    """True if the routed experts of a GPU's stage stay in the memory of the host, whose cores
    compute them."""

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        shared = self.shared_expert.weights_per_token(hidden_size) if self.shared_expert else 0
        experts = self.top_k * self.expert.weights_per_token(hidden_size)
        return experts + shared + self.num_experts * hidden_size


@dataclass(frozen=True)
class ExpertBranchSpec:
    """Specification of a mixture of experts beside a layer's MLP.

    Both read the residual stream, each by its own norm; their normalized outputs are added.
    """

    experts: ExpertsSpec
    norm: NormSpec
    """Norm before the experts."""
    router_norm: NormSpec
    """Norm before the router."""
    post_norm: NormSpec
    """Norm of the experts' output."""
    post_mlp_norm: NormSpec
    """Norm of the MLP's output before both are added."""


@dataclass(frozen=True)
class PerLayerInputSpec:
    """Specification of the addend that a layer computes from its per-layer embedding.

    It is norm(projection(activation(gate(hidden)) * embedding)), added after the MLP.
    """

    size: int
    """Elements of the layer's part of the embedding."""
    activation: str
    """A name of gllm.kernels.activation."""
    gate: LinearSpec
    projection: LinearSpec
    norm: NormSpec
