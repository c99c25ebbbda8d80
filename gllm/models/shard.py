"""Shards of a model: the part of it that one of several tensor parallel ranks holds and computes.

Attention is divided by heads, feed-forward blocks and experts by their inner size, embedding and LM
head by the vocabulary. Output and down projections then yield partial sums: each block ends with
one sum over the ranks. Where there are fewer KV heads than ranks, several ranks hold the same one.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import (
    LayerSpec,
    NoMixerSpec,
    ParallelMixerSpec,
    SequenceMixerSpec,
    SingleMixerSpec,
)
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import DimensionShard, LinearSpec, NormSpec
from gllm.models.spec.recurrent import (
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
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
    return _shard_blocks(rows, shape[0], block[0]), _shard_blocks(columns, shape[1], block[1])


def _shard_blocks(shard: DimensionShard | None, count: int, length: int) -> DimensionShard | None:
    """Return the blocks of a dimension that a shard at their borders holds.

    Args:
        shard: shard of the dimension's elements.
        count: number of blocks that are stored.
        length: elements per block.

    Raises:
        ValueError: the dimension has another number of blocks.
    """
    if shard is not None and count != -(-shard.size // length):
        raise ValueError(
            f"has {count} scales along {shard.size} elements, but {length} elements share a scale"
        )
    return shard_groups(shard, length)


def shard_groups(shard: DimensionShard | None, length: int) -> DimensionShard | None:
    """Return the groups of a shard that begins and ends at multiples of a group's length.

    Args:
        shard: shard of the dimension's elements; None for all of them.
        length: elements per group.
    """
    if shard is None:
        return None
    runs = tuple((begin // length, -(-end // length)) for begin, end in shard.runs)
    return DimensionShard(-(-shard.size // length), runs)


def head_shard(attention: AttentionSpec) -> DimensionShard:
    """Return the query heads of one rank's attention among those of all ranks."""
    count, first = attention.num_heads, attention.first_head
    return DimensionShard(attention.total_num_heads or count, ((first, first + count),))


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
    layers = {id(layer): part.shard_layer(layer) for layer in model.layers}
    rows = part.shard_vocabulary(model.vocab_size)
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
    for mixer in (mixer for layer in layers for mixer in layer.mixers):
        name, count = _shared_size(mixer)
        if count % ranks and ranks % count:
            return f"{name} is {count}, neither a multiple nor a divisor of {ranks}"
    vocabulary = model.vocab_size
    if (ranks - 1) * -(-vocabulary // ranks) >= vocabulary:
        return f"vocab_size is {vocabulary}, which leaves the last of {ranks} ranks without tokens"
    stored = model.quantization
    block = None if stored is None else stored.block
    if stored is None or block is None or ranks == 1:
        return None
    if stored.has_act_order:
        return (
            "quantization_config has desc_act or actorder: the inputs of each rank belong to "
            f"groups of {block[1]} that other ranks have too"
        )
    parts = [_Part(rank, ranks) for rank in range(ranks)]
    obstacles = (_find_split_block(layer, part, block) for layer in layers for part in parts)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def _divided_sizes(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield name and value of each size of a layer of which every rank has an equal part."""
    for mixer in layer.mixers:
        if isinstance(mixer, RecurrentSpec):
            yield mixer.divided_size
        elif not isinstance(mixer, NoMixerSpec):
            yield "num_attention_heads", mixer.num_heads
    for name, block in _mlps(layer):
        yield name, block.intermediate_size


def _shared_size(mixer: SingleMixerSpec) -> tuple[str, int]:
    """Return name and value of a size of which several ranks may have the same part; 0 for none."""
    if isinstance(mixer, AttentionSpec):
        return "num_key_value_heads", mixer.num_kv_heads
    if isinstance(mixer, Mamba2Spec):
        return mixer.groups_key, mixer.num_groups
    return "", 0


def _mlps(layer: LayerSpec) -> Iterator[tuple[str, MLPSpec]]:
    """Yield the MLPs of a layer, of the experts one, each with the name of its inner size."""
    blocks = [layer.mlp, *([layer.experts.experts] if layer.experts else [])]
    for block in blocks:
        if isinstance(block, MLPSpec):
            yield "intermediate_size", block
        if not isinstance(block, ExpertsSpec):
            continue
        yield "intermediate_size of the experts", block.expert
        if block.shared_expert is not None:
            yield "intermediate_size of the shared expert", block.shared_expert


def _find_split_block(layer: LayerSpec, part: "_Part", block: tuple[int, int]) -> str | None:
    """Return the first size whose part ends within a block of weights with one scale."""
    sizes = dict(_divided_sizes(layer))
    if isinstance(layer.attention, AttentionSpec):
        sizes["num_key_value_heads"] = layer.attention.num_kv_heads
    for name, linear in _divided_linears(part.shard_layer(layer)):
        columns = () if linear.columns is None else (linear.columns,)
        shards = [(shard, block[0]) for shard in linear.rows] + [
            (shard, block[1]) for shard in columns
        ]
        if not all(is_aligned(shard, length) for shard, length in shards):
            return (
                f"{name} is {sizes[name]}: a part of {linear.names[0]} for each of {part.ranks} "
                f"ranks would split blocks of {block[0]} x {block[1]} weights that share a scale"
            )
    return None


def _divided_linears(layer: LayerSpec) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the linear layers of a shard, each with the name of the size that divides it."""
    for mixer in layer.mixers:
        yield from _divided_mixer_linears(mixer)
    for name, block in _mlps(layer):
        yield name, block.up_proj
        yield name, block.down_proj


def _divided_mixer_linears(attention: SingleMixerSpec) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the linear layers of a block, each with the name of the size that divides it."""
    heads = "num_attention_heads"
    if isinstance(attention, RecurrentSpec):
        heads, _ = attention.divided_size
        for linear in attention.in_linears:
            yield heads, linear
    elif isinstance(attention, LatentAttentionSpec):
        yield heads, attention.q_proj
        yield heads, attention.kv_up_proj
        if attention.gate_proj is not None:
            yield heads, attention.gate_proj
    elif isinstance(attention, AttentionSpec):
        qkv = attention.qkv_proj
        # Gates, if there are some, and queries; then keys and values.
        first = max(len(qkv.names) - 2, 1)
        yield heads, replace(qkv, names=qkv.names[:first], rows=qkv.rows[:first])
        if len(qkv.names) > first:
            rest = replace(qkv, names=qkv.names[first:], rows=qkv.rows[first:])
            yield "num_key_value_heads", rest
        if attention.gate_proj is not None:
            yield heads, attention.gate_proj
    if not isinstance(attention, NoMixerSpec):
        yield heads, attention.out_proj


@dataclass(frozen=True)
class _Part:
    """One of several equal parts of a model, whose sizes all divide."""

    rank: int
    ranks: int

    def shard_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            attention=self.shard_sequence_mixer(layer.attention),
            mlp=self.shard_feed_forward(layer.mlp),
            experts=None
            if layer.experts is None
            else replace(layer.experts, experts=self.shard_experts(layer.experts.experts)),
        )

    def shard_feed_forward(
        self, spec: MLPSpec | ExpertsSpec | None
    ) -> MLPSpec | ExpertsSpec | None:
        if isinstance(spec, ExpertsSpec):
            return self.shard_experts(spec)
        return None if spec is None else self.shard_mlp(spec, is_summed=True)

    def shard_sequence_mixer(self, spec: SequenceMixerSpec) -> SequenceMixerSpec:
        if isinstance(spec, AttentionSpec):
            return self.shard_attention(spec)
        if isinstance(spec, LatentAttentionSpec):
            return self.shard_latent_attention(spec)
        if isinstance(spec, NoMixerSpec):
            return spec
        if isinstance(spec, ParallelMixerSpec):
            attention, recurrent = (
                self.shard_attention(spec.attention),
                self.shard_mamba2(spec.recurrent),
            )
            return replace(spec, attention=attention, recurrent=recurrent)
        if isinstance(spec, ShortConvSpec):
            return self.shard_short_conv(spec)
        if isinstance(spec, LightningSpec):
            return self.shard_lightning(spec)
        if isinstance(spec, Mamba1Spec):
            return self.shard_mamba1(spec)
        if isinstance(spec, Mamba2Spec):
            return self.shard_mamba2(spec)
        if isinstance(spec, KimiDeltaSpec):
            return self.shard_kimi_delta(spec)
        return self.shard_delta_net(spec)

    def shard_attention(self, spec: AttentionSpec) -> AttentionSpec:
        heads, kv_heads = self._run(spec.num_heads), self._kv_run(spec.num_kv_heads)

        def norm(norm_spec: NormSpec | None, total: int, run: Run) -> NormSpec | None:
            if norm_spec is None or not (spec.has_norm_per_head or spec.has_projection_norm):
                return norm_spec
            unit = spec.head_dim if spec.has_projection_norm else 1
            return replace(norm_spec, heads=_make_shard(total * unit, _scaled(run, unit)))

        return replace(
            spec,
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            qkv_proj=replace(spec.qkv_proj, rows=_shard_qkv(spec, heads, kv_heads)),
            out_proj=self._shard_inputs(
                spec.out_proj, spec.num_heads, spec.value_dim or spec.head_dim
            ),
            gate_proj=None
            if spec.gate_proj is None
            else replace(spec.gate_proj, rows=(self._shard(spec.num_heads),)),
            query_norm=norm(spec.query_norm, spec.num_heads, heads),
            key_norm=norm(spec.key_norm, spec.num_kv_heads, kv_heads),
            first_head=heads[0],
            total_num_heads=spec.num_heads,
        )

    def shard_latent_attention(self, spec: LatentAttentionSpec) -> LatentAttentionSpec:
        def rows(linear: LinearSpec, head_dim: int) -> LinearSpec:
            return replace(linear, rows=(self._shard(spec.num_heads, head_dim),))

        return replace(
            spec,
            num_heads=spec.num_heads // self.ranks,
            q_proj=rows(spec.q_proj, spec.nope_head_dim + spec.rope_head_dim),
            kv_up_proj=rows(spec.kv_up_proj, spec.nope_head_dim + spec.value_dim),
            gate_proj=None if spec.gate_proj is None else rows(spec.gate_proj, 1),
            out_proj=self._shard_inputs(spec.out_proj, spec.num_heads, spec.value_dim),
        )

    def shard_short_conv(self, spec: ShortConvSpec) -> ShortConvSpec:
        size = spec.num_channels
        begin, end = self._run(size)
        runs = [(part * size + begin, part * size + end) for part in range(3)]
        return replace(
            spec,
            num_channels=end - begin,
            in_proj=replace(spec.in_proj, rows=(_make_shard(3 * size, *runs),)),
            conv=replace(spec.conv, rows=(self._shard(size),)),
            out_proj=self._shard_inputs(spec.out_proj, size),
        )

    def shard_lightning(self, spec: LightningSpec) -> LightningSpec:
        elements, (begin, end) = self._shard(spec.inner_size), self._run(spec.num_heads)
        return replace(
            spec,
            num_heads=end - begin,
            qkv_proj=replace(spec.qkv_proj, rows=(self._shard(spec.num_heads, 3 * spec.head_dim),)),
            gate_proj=replace(spec.gate_proj, rows=(elements,)),
            out_proj=self._shard_inputs(spec.out_proj, spec.inner_size),
            slopes=spec.slopes[begin:end],
            norm_rows=elements,
        )

    def shard_mamba1(self, spec: Mamba1Spec) -> Mamba1Spec:
        size, own = spec.num_channels, self._shard(spec.num_channels)
        begin, end = self._run(size)
        halves = _make_shard(2 * size, (begin, end), (size + begin, size + end))
        return replace(
            spec,
            num_channels=end - begin,
            in_proj=replace(spec.in_proj, rows=(halves,)),
            conv=replace(spec.conv, rows=(own,)),
            selection_proj=self._shard_inputs(spec.selection_proj, size),
            step_proj=replace(spec.step_proj, rows=(own,)),
            step_bias=replace(spec.step_bias, rows=own),
            decay=replace(spec.decay, rows=own),
            skip=replace(spec.skip, rows=own),
            out_proj=self._shard_inputs(spec.out_proj, size),
        )

    def shard_mamba2(self, spec: Mamba2Spec) -> Mamba2Spec:
        inner, keys = spec.inner_size, spec.num_groups * spec.state_size
        groups, is_shared = self._kv_run(spec.num_groups), spec.num_groups % self.ranks != 0
        value, key = self._run(inner), _scaled(groups, spec.state_size)
        sizes = inner, inner, keys, keys, spec.num_heads
        runs, begin = [], 0
        for size, run in zip(sizes, (value, value, key, key, self._run(sizes[4])), strict=True):
            runs.append((begin + run[0], begin + run[1]))
            begin += size
        channels = [(run[0] - inner, run[1] - inner) for run in runs[1:4]]
        heads = self._shard(spec.num_heads)
        return replace(
            spec,
            num_heads=spec.num_heads // self.ranks,
            num_groups=groups[1] - groups[0],
            first_group=groups[0],
            total_num_groups=spec.num_groups if is_shared else None,
            in_proj=replace(spec.in_proj, rows=(_make_shard(sum(sizes), *runs),)),
            conv=replace(spec.conv, rows=(_make_shard(spec.num_channels, *channels),)),
            decay=replace(spec.decay, rows=heads),
            step_bias=replace(spec.step_bias, rows=heads),
            skip=replace(spec.skip, rows=heads),
            out_proj=self._shard_inputs(spec.out_proj, inner),
            norm_rows=self._shard(inner),
        )

    def shard_delta_net(self, spec: DeltaNetSpec) -> DeltaNetSpec:
        num_keys, num_values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        keys, values = self._run(num_keys), self._run(num_values)

        def shift(run: Run, begin: int) -> Run:
            return begin + run[0], begin + run[1]

        channels = _make_shard(
            spec.num_channels, keys, shift(keys, num_keys), shift(values, 2 * num_keys)
        )
        heads = self._shard(spec.num_heads)
        in_rows: tuple[DimensionShard, ...] = channels, self._shard(num_values)
        gate_rows: tuple[DimensionShard, ...] = heads, heads
        if spec.is_grouped_by_key_head:
            in_rows = (self._shard(spec.num_channels + num_values),)
            gate_rows = (self._shard(2 * spec.num_heads),)
        return replace(
            spec,
            num_heads=spec.num_heads // self.ranks,
            num_key_heads=spec.num_key_heads // self.ranks,
            in_proj=replace(spec.in_proj, rows=in_rows),
            gate_proj=replace(spec.gate_proj, rows=gate_rows),
            conv=replace(spec.conv, rows=(channels,)),
            decay=replace(spec.decay, rows=heads),
            decay_bias=replace(spec.decay_bias, rows=heads),
            out_proj=self._shard_inputs(spec.out_proj, spec.num_heads, spec.value_dim),
        )

    def shard_kimi_delta(self, spec: KimiDeltaSpec) -> KimiDeltaSpec:
        heads, elements = self._shard(spec.num_heads), self._shard(spec.inner_size)
        whole = _make_shard(spec.head_dim, (0, spec.head_dim))
        return replace(
            spec,
            num_heads=spec.num_heads // self.ranks,
            qkv_proj=replace(spec.qkv_proj, rows=(elements,) * 3),
            down_proj=replace(
                spec.down_proj, rows=(heads, whole, whole)[: len(spec.down_proj.names)]
            ),
            decay_proj=replace(spec.decay_proj, rows=(elements,)),
            gate_proj=replace(spec.gate_proj, rows=(elements,)),
            conv=replace(spec.conv, rows=(elements,) * 3),
            decay=replace(spec.decay, rows=heads),
            decay_bias=replace(spec.decay_bias, rows=elements),
            out_proj=self._shard_inputs(spec.out_proj, spec.inner_size),
        )

    def shard_mlp(self, spec: MLPSpec, is_summed: bool) -> MLPSpec:
        size, up_proj = spec.intermediate_size, spec.up_proj
        begin, end = self._run(size)
        if spec.is_gated and len(up_proj.names) == 1:
            rows = [_make_shard(2 * size, (begin, end), (size + begin, size + end))]
        else:
            rows = [_make_shard(size, (begin, end))] * len(up_proj.names)
        return replace(
            spec,
            intermediate_size=end - begin,
            up_proj=replace(up_proj, rows=tuple(rows)),
            down_proj=self._shard_inputs(spec.down_proj, size, is_summed=is_summed),
        )

    def shard_experts(self, spec: ExpertsSpec) -> ExpertsSpec:
        shared = spec.shared_expert
        return replace(
            spec,
            expert=self.shard_mlp(spec.expert, is_summed=False),
            shared_expert=None if shared is None else self.shard_mlp(shared, is_summed=False),
            is_summed=True,
        )

    def shard_vocabulary(self, size: int) -> DimensionShard:
        share = -(-size // self.ranks)
        return _make_shard(size, (self.rank * share, min((self.rank + 1) * share, size)))

    def _run(self, size: int) -> Run:
        share = size // self.ranks
        return self.rank * share, (self.rank + 1) * share

    def _kv_run(self, heads: int) -> Run:
        """Return this rank's KV heads, or groups, those of its query heads: at least one."""
        begin = self.rank * heads // self.ranks
        return begin, begin + max(heads // self.ranks, 1)

    def _shard(self, size: int, unit: int = 1) -> DimensionShard:
        """Return this rank's part of `size` units of `unit` elements."""
        begin, end = self._run(size)
        return _make_shard(size * unit, (begin * unit, end * unit))

    def _shard_inputs(
        self, linear: LinearSpec, size: int, unit: int = 1, is_summed: bool = True
    ) -> LinearSpec:
        return replace(linear, columns=self._shard(size, unit), is_summed=is_summed)


def _shard_qkv(spec: AttentionSpec, heads: Run, kv_heads: Run) -> tuple[DimensionShard, ...]:
    """Return the outputs of some heads, for each tensor of a whole qkv_proj."""
    dim, num_heads, num_kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads

    def run(of: Run, first: int = 0) -> Run:
        return (first + of[0]) * dim, (first + of[1]) * dim

    if spec.kv_layers_back:
        return (_make_shard(num_heads * dim, run(heads)),)
    if spec.is_grouped_by_kv_head:
        return (_make_shard((num_heads + 2 * num_kv_heads) * dim, *_group_runs(spec, heads)),)
    if len(spec.qkv_proj.names) == 1:
        keys, values = run(kv_heads, num_heads), run(kv_heads, num_heads + num_kv_heads)
        return (_make_shard((num_heads + 2 * num_kv_heads) * dim, run(heads), keys, values),)
    kv_shard = _make_shard(num_kv_heads * dim, run(kv_heads))
    if spec.has_gate_proj:
        head_rows = _make_shard(num_heads * dim, run(heads))
        return head_rows, head_rows, kv_shard, kv_shard
    size = dim * (1 + spec.has_output_gate)
    query_shard = _make_shard(num_heads * size, (heads[0] * size, heads[1] * size))
    value_dim = spec.value_dim or dim
    value_run = kv_heads[0] * value_dim, kv_heads[1] * value_dim
    return query_shard, kv_shard, _make_shard(num_kv_heads * value_dim, value_run)


def _group_runs(spec: AttentionSpec, heads: Run) -> Iterator[Run]:
    """Yield the rows of some query heads and of their KV heads, stored KV head by KV head."""
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    for kv_head in range(heads[0] // group, -(-heads[1] // group)):
        first = kv_head * (group + 2)
        begin, end = (min(max(head - kv_head * group, 0), group) for head in heads)
        yield (first + begin) * dim, (first + end) * dim
        yield (first + group) * dim, (first + group + 2) * dim


def _scaled(run: Run, unit: int) -> Run:
    """Return a run of units as one of their elements."""
    return run[0] * unit, run[1] * unit


def _make_shard(size: int, *runs: Run) -> DimensionShard:
    """Return a shard; runs that follow each other become one."""
    merged: list[Run] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return DimensionShard(size, tuple(merged))
