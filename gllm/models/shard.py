"""Shards of a model: the part of it that one of several tensor parallel ranks holds and computes.

Attention is divided by heads, feed-forward blocks and experts by their inner size, embedding and LM
head by the vocabulary. Output and down projections then yield partial sums: each block ends with
one sum over the ranks. Where there are fewer KV heads than ranks, several ranks hold the same one.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gllm.models.spec import (
    AttentionSpec,
    DimensionShard,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)

TensorShards = tuple[DimensionShard | None, ...]
"""Runs of each dimension of a tensor, None for all of it; empty for the whole tensor."""


def is_aligned(dimension: DimensionShard, length: int) -> bool:
    """Return True if a shard of a dimension begins and ends at multiples of `length` elements."""
    return widen(dimension, length) == dimension


def widen(dimension: DimensionShard, length: int) -> DimensionShard:
    """Return a shard of a dimension, extended to whole blocks of `length` elements."""
    runs: list[tuple[int, int]] = []
    for begin, end in dimension.runs:
        begin, end = begin // length * length, min(-(-end // length) * length, dimension.size)
        if runs and begin <= runs[-1][1]:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return DimensionShard(dimension.size, tuple(runs))


def widen_shards(shards: TensorShards, block: tuple[int, int] | None) -> TensorShards:
    """Return the shards of a weight's dimensions, extended to whole blocks of quantized weights.

    Args:
        shards: shards of the outputs and the inputs.
        block: outputs and inputs that share a scale; None for no change.
    """
    if block is None or not shards:
        return shards
    pairs = zip(shards, block, strict=True)
    return tuple(
        None if dimension is None else widen(dimension, length) for dimension, length in pairs
    )


def shard_scales(
    shards: TensorShards, shape: tuple[int, ...], block: tuple[int, int] | None
) -> TensorShards:
    """Return the shards of a quantized weight's scales that belong to the shards of its values.

    Args:
        shards: shards of the values [outputs, inputs], which end at borders of blocks.
        shape: shape of the stored scales.
        block: outputs and inputs that share a scale; None for one scale per tensor or output.

    Raises:
        ValueError: the shape of the scales does not fit that of the values.
    """
    if not any(shards) or all(length == 1 for length in shape):
        return ()
    rows, columns = shards
    if block is None:
        if rows is None:
            return ()
        if shape[0] != rows.size:
            raise ValueError(f"has {shape[0]} scales, but 1 or {rows.size} are needed")
        return (rows,)
    if len(shape) != 2:
        raise ValueError(f"has scales of shape {shape}, but one for each block of {block} weights")
    return _cut_blocks(rows, shape[0], block[0]), _cut_blocks(columns, shape[1], block[1])


def _cut_blocks(cut: DimensionShard | None, count: int, length: int) -> DimensionShard | None:
    """Return the blocks of a dimension that a cut at their borders holds.

    Args:
        cut: of the dimension's elements.
        count: number of blocks that are stored.
        length: elements per block.

    Raises:
        ValueError: the dimension has another number of blocks.
    """
    if cut is None:
        return None
    if count != -(-cut.size // length):
        raise ValueError(
            f"has {count} scales along {cut.size} elements, but {length} elements share a scale"
        )
    return DimensionShard(
        count, tuple((begin // length, -(-end // length)) for begin, end in cut.runs)
    )


Run = tuple[int, int]
"""Consecutive indices, [begin, end)."""


def shard(model: ModelSpec, rank: int, ranks: int) -> ModelSpec:
    """Return the part of a model that one tensor parallel rank loads and computes.

    Args:
        model: the whole model.
        rank: number of the rank, from 0.
        ranks: number of ranks; with 1 the result is the model itself.

    Raises:
        ValueError: the model cannot be divided among that many ranks.
    """
    assert model.ranks == 1, "only a whole model is sharded"
    assert 0 <= rank < ranks, "ranks are numbered from 0"
    if ranks == 1:
        return model
    if (reason := unsupported_shard_reason(model, ranks)) is not None:
        raise ValueError(reason)
    part = _Part(rank, ranks)
    # Families use one object for equal layers.
    layers = {id(layer): part.cut_layer(layer) for layer in model.layers}
    rows = part.cut_vocabulary(model.vocab_size)
    return replace(
        model,
        embedding=replace(model.embedding, rows=rows),
        head=replace(model.head, rows=rows),
        layers=tuple(layers[id(layer)] for layer in model.layers),
        rank=rank,
        ranks=ranks,
    )


def unsupported_shard_reason(model: ModelSpec, ranks: int) -> str | None:
    """Return why a model cannot be divided among a number of tensor parallel ranks; None if it can.

    The reason names the numbers of ranks that are possible.
    """
    reason = _find_obstacle(model, ranks)
    if reason is None:
        return None
    most = max(layer.attention.num_heads for layer in model.layers)
    *others, last = [
        str(number) for number in range(1, most + 1) if _find_obstacle(model, number) is None
    ]
    choice = f"{', '.join(others)} or {last}" if others else last
    return f"tensor_parallel_size is {ranks}, but {reason}: use {choice}"


def _find_obstacle(model: ModelSpec, ranks: int) -> str | None:
    """Return the first size that does not divide among ranks, as a clause; None if all do."""
    layers = list({id(layer): layer for layer in model.layers}.values())
    for name, size in (size for layer in layers for size in _divided_sizes(layer)):
        if size % ranks:
            return f"{name} is {size}, which {ranks} ranks cannot divide equally"
    for layer in layers:
        heads = layer.attention.num_kv_heads if isinstance(layer.attention, AttentionSpec) else 0
        if heads % ranks and ranks % heads:
            return f"num_key_value_heads is {heads}, neither a multiple nor a divisor of {ranks}"
    vocabulary = model.vocab_size
    if (ranks - 1) * -(-vocabulary // ranks) >= vocabulary:
        return f"vocab_size is {vocabulary}, which leaves the last of {ranks} ranks without tokens"
    block = None if model.quantization is None else model.quantization.block
    if block is None or ranks == 1:
        return None
    parts = [_Part(rank, ranks) for rank in range(ranks)]
    obstacles = (_find_split_block(layer, part, block) for layer in layers for part in parts)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def _divided_sizes(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield name and value of each size of a layer of which every rank has an equal part."""
    yield "num_attention_heads", layer.attention.num_heads
    mlp = layer.mlp
    if isinstance(mlp, MLPSpec):
        yield "intermediate_size", mlp.intermediate_size
        return
    yield "intermediate_size of the experts", mlp.expert.intermediate_size
    if mlp.shared_expert is not None:
        yield "intermediate_size of the shared expert", mlp.shared_expert.intermediate_size


def _find_split_block(layer: LayerSpec, part: "_Part", block: tuple[int, int]) -> str | None:
    """Return the first size whose part ends within a block of weights with one scale."""
    sizes = dict(_divided_sizes(layer))
    if isinstance(layer.attention, AttentionSpec):
        sizes["num_key_value_heads"] = layer.attention.num_kv_heads
    for name, linear in _cut_linears(part.cut_layer(layer)):
        columns = () if linear.columns is None else (linear.columns,)
        cuts = [(cut, block[0]) for cut in linear.rows] + [(cut, block[1]) for cut in columns]
        if not all(is_aligned(cut, length) for cut, length in cuts):
            return (
                f"{name} is {sizes[name]}: a part of {linear.names[0]} for each of {part.ranks} "
                f"ranks would split blocks of {block[0]} x {block[1]} weights that share a scale"
            )
    return None


def _cut_linears(layer: LayerSpec) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the linear layers of a shard, each with the name of the size that divides it."""
    attention, mlp = layer.attention, layer.mlp
    heads = "num_attention_heads"
    if isinstance(attention, LatentAttentionSpec):
        yield heads, attention.q_proj
        yield heads, attention.kv_up_proj
    else:
        qkv = attention.qkv_proj
        yield heads, replace(qkv, names=qkv.names[:1], rows=qkv.rows[:1])
        if len(qkv.names) > 1:
            yield "num_key_value_heads", replace(qkv, names=qkv.names[1:], rows=qkv.rows[1:])
    yield heads, attention.out_proj
    blocks = {"intermediate_size": mlp if isinstance(mlp, MLPSpec) else None}
    if isinstance(mlp, ExpertsSpec):
        blocks["intermediate_size of the experts"] = mlp.expert
        blocks["intermediate_size of the shared expert"] = mlp.shared_expert
    for name, block in blocks.items():
        if block is not None:
            yield name, block.up_proj
            yield name, block.down_proj


@dataclass(frozen=True)
class _Part:
    """One of several equal parts of a model, whose sizes all divide."""

    rank: int
    ranks: int

    def cut_layer(self, layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        return replace(
            layer,
            attention=self.cut_latent_attention(attention)
            if isinstance(attention, LatentAttentionSpec)
            else self.cut_attention(attention),
            mlp=self.cut_experts(layer.mlp)
            if isinstance(layer.mlp, ExpertsSpec)
            else self.cut_mlp(layer.mlp, is_summed=True),
        )

    def cut_attention(self, spec: AttentionSpec) -> AttentionSpec:
        heads, kv_heads = self._run(spec.num_heads), self._kv_run(spec.num_kv_heads)

        def norm(norm_spec: NormSpec | None, total: int, run: Run) -> NormSpec | None:
            if norm_spec is None or not spec.has_norm_per_head:
                return norm_spec
            return replace(norm_spec, heads=_make_cut(total, run))

        return replace(
            spec,
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            qkv_proj=replace(spec.qkv_proj, rows=_cut_qkv(spec, heads, kv_heads)),
            out_proj=self._cut_inputs(spec.out_proj, spec.num_heads, spec.head_dim),
            query_norm=norm(spec.query_norm, spec.num_heads, heads),
            key_norm=norm(spec.key_norm, spec.num_kv_heads, kv_heads),
            first_head=heads[0],
            total_num_heads=spec.num_heads,
        )

    def cut_latent_attention(self, spec: LatentAttentionSpec) -> LatentAttentionSpec:
        def rows(linear: LinearSpec, head_dim: int) -> LinearSpec:
            return replace(linear, rows=(self._cut(spec.num_heads, head_dim),))

        return replace(
            spec,
            num_heads=spec.num_heads // self.ranks,
            q_proj=rows(spec.q_proj, spec.nope_head_dim + spec.rope.dim),
            kv_up_proj=rows(spec.kv_up_proj, spec.nope_head_dim + spec.value_dim),
            out_proj=self._cut_inputs(spec.out_proj, spec.num_heads, spec.value_dim),
        )

    def cut_mlp(self, spec: MLPSpec, is_summed: bool) -> MLPSpec:
        size, up_proj = spec.intermediate_size, spec.up_proj
        begin, end = self._run(size)
        if spec.is_gated and len(up_proj.names) == 1:
            rows = [_make_cut(2 * size, (begin, end), (size + begin, size + end))]
        else:
            rows = [_make_cut(size, (begin, end))] * len(up_proj.names)
        return replace(
            spec,
            intermediate_size=end - begin,
            up_proj=replace(up_proj, rows=tuple(rows)),
            down_proj=self._cut_inputs(spec.down_proj, size, is_summed=is_summed),
        )

    def cut_experts(self, spec: ExpertsSpec) -> ExpertsSpec:
        shared = spec.shared_expert
        return replace(
            spec,
            expert=self.cut_mlp(spec.expert, is_summed=False),
            shared_expert=None if shared is None else self.cut_mlp(shared, is_summed=False),
            is_summed=True,
        )

    def cut_vocabulary(self, size: int) -> DimensionShard:
        share = -(-size // self.ranks)
        return _make_cut(size, (self.rank * share, min((self.rank + 1) * share, size)))

    def _run(self, size: int) -> Run:
        share = size // self.ranks
        return self.rank * share, (self.rank + 1) * share

    def _kv_run(self, heads: int) -> Run:
        """Return this rank's KV heads, those of its query heads: at least one."""
        begin = self.rank * heads // self.ranks
        return begin, begin + max(heads // self.ranks, 1)

    def _cut(self, size: int, unit: int = 1) -> DimensionShard:
        """Return this rank's part of `size` units of `unit` elements."""
        begin, end = self._run(size)
        return _make_cut(size * unit, (begin * unit, end * unit))

    def _cut_inputs(
        self, linear: LinearSpec, size: int, unit: int = 1, is_summed: bool = True
    ) -> LinearSpec:
        return replace(linear, columns=self._cut(size, unit), is_summed=is_summed)


def _cut_qkv(spec: AttentionSpec, heads: Run, kv_heads: Run) -> tuple[DimensionShard, ...]:
    """Return the outputs of some heads, for each tensor of a whole qkv_proj."""
    dim, num_heads, num_kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads

    def run(of: Run, first: int = 0) -> Run:
        return (first + of[0]) * dim, (first + of[1]) * dim

    if spec.is_grouped_by_kv_head:
        return (_make_cut((num_heads + 2 * num_kv_heads) * dim, *_group_runs(spec, heads)),)
    if len(spec.qkv_proj.names) == 1:
        keys, values = run(kv_heads, num_heads), run(kv_heads, num_heads + num_kv_heads)
        return (_make_cut((num_heads + 2 * num_kv_heads) * dim, run(heads), keys, values),)
    kv_cut = _make_cut(num_kv_heads * dim, run(kv_heads))
    return _make_cut(num_heads * dim, run(heads)), kv_cut, kv_cut


def _group_runs(spec: AttentionSpec, heads: Run) -> Iterator[Run]:
    """Yield the rows of some query heads and of their KV heads, stored KV head by KV head."""
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    for kv_head in range(heads[0] // group, -(-heads[1] // group)):
        first = kv_head * (group + 2)
        begin, end = (min(max(head - kv_head * group, 0), group) for head in heads)
        yield (first + begin) * dim, (first + end) * dim
        yield (first + group) * dim, (first + group + 2) * dim


def _make_cut(size: int, *runs: Run) -> DimensionShard:
    """Return a cut; runs that follow each other become one."""
    merged: list[Run] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return DimensionShard(size, tuple(merged))
