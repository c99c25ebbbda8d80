"""Placement of routed experts: layers that keep theirs in the memory of the host."""

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
