"""Placement of routed experts: layers that keep theirs on the host, and a GPU's cache of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gllm.config.engine import ALL_EXPERTS, NO_EXPERTS
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.options.field_types import FieldError


def layer_experts(layer: LayerSpec) -> ExpertsSpec | None:
    """Return the mixture of experts of a layer; None for a layer without one."""
    if layer.experts is not None:
        return layer.experts.experts
    return layer.mlp if isinstance(layer.mlp, ExpertsSpec) else None


def place_experts(model: ModelSpec, cpu_experts: str) -> ModelSpec:
    """Return a model whose first layers with experts keep the routed ones on the host.

    Args:
        model: the whole model.
        cpu_experts: number of those layers, all, or none.

    Raises:
        FieldError: the model has no experts, or fewer layers with them.
    """
    if cpu_experts == NO_EXPERTS:
        return model
    sparse = [index for index, layer in enumerate(model.layers) if layer_experts(layer) is not None]
    if not sparse:
        raise FieldError(
            "cpu_experts",
            f"cpu_experts is {cpu_experts}, but this model has no experts (MoE): leave cpu_experts "
            "out",
        )
    count = len(sparse) if cpu_experts == ALL_EXPERTS else int(cpu_experts)
    if count > len(sparse):
        raise FieldError(
            "cpu_experts",
            f"cpu_experts is {count}, but this model has {len(sparse)} layers with experts: use "
            f"{ALL_EXPERTS}, or {len(sparse)} at most",
        )
    layers = list(model.layers)
    for index in sparse[:count]:
        layers[index] = _keep_on_host(layers[index])
    return replace(model, layers=tuple(layers))


def _keep_on_host(layer: LayerSpec) -> LayerSpec:
    if layer.experts is not None:
        spec = replace(layer.experts.experts, is_on_host=True)
        return replace(layer, experts=replace(layer.experts, experts=spec))
    assert isinstance(layer.mlp, ExpertsSpec), "the layer has experts"
    return replace(layer, mlp=replace(layer.mlp, is_on_host=True))


def host_experts(layers: Sequence[LayerSpec]) -> Iterator[ExpertsSpec]:
    """Yield the experts of each layer that keeps them on the host."""
    for layer in layers:
        experts = layer_experts(layer)
        if experts is not None and experts.is_on_host:
            yield experts


def host_share(model: ModelSpec, layers: Sequence[LayerSpec] | None = None) -> float:
    """Return the share of weights that are experts on the host, 0..1.

    Args:
        model: the whole model.
        layers: those of a stage, whose weights alone are counted; None for all, with the ends.
    """
    hidden = model.hidden_size
    on_host, total = 0, 2 * hidden * model.vocab_size if layers is None else 0
    for layer in model.layers if layers is None else layers:
        total += layer.weights_per_token(hidden)
        if (spec := layer_experts(layer)) is None:
            continue
        expert = spec.expert.weights_per_token(hidden)
        total += (spec.num_experts - spec.top_k) * expert
        on_host += spec.is_on_host * spec.num_experts * expert
    return on_host / total


ONCE_SLOTS = 2
"""Places on a GPU for weights that one step uses, shared by the layers."""


def expert_elements(spec: ExpertsSpec, hidden_size: int) -> int:
    """Return the number of weights of one expert, with its biases."""
    inner, biases = spec.expert.intermediate_size, 0
    if spec.expert.up_proj.has_bias:
        biases += 2 * inner
    if spec.expert.down_proj.has_bias:
        biases += hidden_size
    return 3 * hidden_size * inner + biases


def count_cache_slots(
    specs: Sequence[ExpertsSpec], hidden_size: int, item_bytes: int, cache_bytes: int
) -> int:
    """Return the experts of each layer whose weights fit into a GPU's cache.

    Args:
        specs: experts of the stage's layers that are on the host.
        hidden_size: elements of a token's hidden state.
        item_bytes: bytes of a weight in the cache.
        cache_bytes: bytes of the cache.

    Raises:
        FieldError: not one expert of each layer fits, or the experts have no gate.
    """
    if not all(spec.expert.is_gated for spec in specs):
        raise FieldError(
            "expert_cache",
            "expert_cache: kernels of GPUs compute experts with a gate, which those of this model "
            "do not have: leave expert_cache out",
        )
    sizes = [item_bytes * expert_elements(spec, hidden_size) for spec in specs]
    # Each layer has a slot of zeros, for the choices that the host computes.
    fixed = sum(sizes) + (ONCE_SLOTS + 1) * max(sizes)
    num_slots = (cache_bytes - fixed) // sum(sizes)
    if num_slots < 1:
        raise FieldError(
            "expert_cache",
            f"expert_cache is {cache_bytes} bytes, but one expert of each of the {len(sizes)} "
            f"layers needs {fixed + sum(sizes)}: raise it, or leave it out",
        )
    return min(num_slots, max(spec.num_experts for spec in specs))
