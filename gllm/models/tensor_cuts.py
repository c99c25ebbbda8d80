"""Cuts of a shard's tensors, by the names that a checkpoint has."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gllm.models.block_cuts import TensorCuts
from gllm.models.spec import (
    AttentionSpec,
    Cut,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)


def tensor_cuts(model: ModelSpec, layers: range) -> dict[str, TensorCuts]:
    """Return the cuts of all tensors of a stage of which a rank holds a part.

    Scales of quantized weights are not among them; `block_cuts.cut_scales` returns theirs.

    Args:
        model: the shard of one rank; a whole model has no cuts.
        layers: of the stage.
    """
    cuts: dict[str, TensorCuts] = {}
    if model.ranks == 1:
        return cuts
    embedding, head = model.embedding, model.head
    for name, rows in ((embedding.name, embedding.rows), (head.name, head.rows)):
        cuts[f"{name}.weight"] = rows, None
        cuts[f"{name}.bias"] = (rows,)
    for index in layers:
        layer, prefix = model.layers[index], model.layer_name_format.format(index)
        for linear in _linears(layer):
            cuts |= {f"{prefix}.{name}": cut for name, cut in _linear_cuts(linear)}
        for norm in _head_norms(layer):
            cuts |= {f"{prefix}.{norm.name}.{kind}": (norm.heads,) for kind in ("weight", "bias")}
    return {name: cut for name, cut in cuts.items() if any(cut)}


def _linears(layer: LayerSpec) -> Iterator[LinearSpec]:
    """Yield the linear layers of a layer that may be cut, of each expert its own."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionSpec):
        yield attention.qkv_proj
    else:
        yield from (attention.q_proj, attention.kv_up_proj)
    yield attention.out_proj
    if isinstance(mlp, MLPSpec):
        yield from (mlp.up_proj, mlp.down_proj)
        return
    for linear in (mlp.expert.up_proj, mlp.expert.down_proj):
        for index in range(mlp.num_experts):
            yield replace(linear, names=tuple(name.format(index) for name in linear.names))
    if mlp.shared_expert is not None:
        yield from (mlp.shared_expert.up_proj, mlp.shared_expert.down_proj)


def _head_norms(layer: LayerSpec) -> Iterator[NormSpec]:
    """Yield the norms with a scale for each head."""
    if isinstance(layer.attention, AttentionSpec):
        norms = layer.attention.query_norm, layer.attention.key_norm
        yield from (norm for norm in norms if norm is not None)


def _linear_cuts(linear: LinearSpec) -> Iterator[tuple[str, TensorCuts]]:
    """Yield the tensors of a linear layer and their cuts."""
    cuts: Sequence[Cut | None] = linear.rows or [None] * len(linear.names)
    for name, rows in zip(linear.names, cuts, strict=True):
        yield f"{name}.bias", (rows,)
        is_transposed = linear.is_transposed
        yield (
            f"{name}.weight",
            (linear.columns, rows) if is_transposed else (rows, linear.columns),
        )
