"""Shards: every rank's rows are those of its heads; what does not divide is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.models.config_reader import ConfigReader
from gllm.models.registry import spec_builder
from gllm.models.shard import shard, unsupported_shard_reason
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.model import ModelSpec, QuantizationSpec
from gllm.models.spec.parts import DimensionShard, LinearSpec
from gllm.models.spec.recurrent import Mamba1Spec, ShortConvSpec
from tests.support.examples import num_examples
from tests.support.models.published import PUBLISHED, read

LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 240,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
MOE = LLAMA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def build(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    base = MOE if "Moe" in architecture else LLAMA
    return spec_builder(architecture)(ConfigReader(base | changes))


def grouped(model: ModelSpec) -> AttentionSpec:
    attention = model.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def held(cut: DimensionShard) -> list[int]:
    """The indices of a cut, as they are stacked."""
    assert all(0 <= begin < end <= cut.size for begin, end in cut.runs)
    indices = [index for run in cut.runs for index in range(*run)]
    assert len(indices) == cut.num_elements
    return indices


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, str]:
    """Ranks, query heads, KV heads, elements of a head, and the way in which they are stored."""
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    divisors = [number for number in range(1, ranks) if ranks % number == 0]
    kv_heads = draw(st.sampled_from(divisors) | st.integers(1, 3).map(lambda n: n * ranks))
    per_rank = draw(st.integers(1, 3))
    heads = kv_heads * per_rank * (ranks // kv_heads if kv_heads < ranks else 1)
    layout = draw(st.sampled_from(["separate", "fused", "by KV head"]))
    return ranks, heads, kv_heads, draw(st.sampled_from([2, 4])), layout


def stored_rows(layout: str, heads: int, kv_heads: int) -> list[list[tuple[str, int]]]:
    """Heads of queries, keys and values in each tensor, as they are stored."""
    query, key, value = (
        [(kind, head) for head in range(count)]
        for kind, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if layout == "separate":
        return [query, key, value]
    if layout == "fused":
        return [query + key + value]
    group = heads // kv_heads
    return [
        [
            row
            for kv_head in range(kv_heads)
            for row in (
                *query[kv_head * group : (kv_head + 1) * group],
                key[kv_head],
                value[kv_head],
            )
        ]
    ]


@settings(max_examples=num_examples(40, 300), deadline=None)
@given(shapes())
def test_a_rank_has_the_rows_of_its_heads(shape: tuple[int, int, int, int, str]) -> None:
    """Also where several ranks hold one KV head: it is that of their queries."""
    ranks, heads, kv_heads, dim, layout = shape
    model = build(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * dim)
    whole = grouped(model)
    names = whole.qkv_proj.names if layout == "separate" else ("qkv",)
    whole = replace(
        whole,
        qkv_proj=LinearSpec(names),
        is_grouped_by_kv_head=layout == "by KV head",
    )
    model = replace(model, layers=(replace(model.layers[0], attention=whole),))
    rows = stored_rows(layout, heads, kv_heads)
    queries: list[int] = []
    for rank in range(ranks):
        part = grouped(shard(model, rank, ranks))
        own = range(part.first_head, part.first_head + part.num_heads)
        kv_own = sorted({head // (heads // kv_heads) for head in own})
        assert part.num_kv_heads == len(kv_own)
        assert part.total_num_heads == heads
        for tensor, cut in zip(rows, part.qkv_proj.rows, strict=True):
            assert cut.size == len(tensor) * dim
            wanted = [
                tensor.index((kind, head)) * dim + element
                for kind, head in tensor
                if head in (own if kind == "q" else kv_own)
                for element in range(dim)
            ]
            assert held(cut) == wanted
        columns = part.out_proj.columns
        assert columns is not None
        assert columns.size == heads * dim
        assert held(columns) == [head * dim + element for head in own for element in range(dim)]
        assert part.out_proj.is_summed
        assert not part.qkv_proj.is_summed
        queries += own
    assert queries == list(range(heads))


def cuts_of(spec: MLPSpec) -> tuple[list[list[int]], list[int]]:
    """Held outputs of up_proj's tensors, and inputs of down_proj."""
    assert spec.down_proj.columns is not None
    return [held(cut) for cut in spec.up_proj.rows], held(spec.down_proj.columns)


@settings(max_examples=num_examples(40, 300), deadline=None)
@given(st.integers(1, 6), st.sampled_from([2, 3, 4]), st.booleans(), st.booleans())
def test_gate_and_up_have_the_inputs_of_down(
    share: int, ranks: int, is_gated: bool, is_fused: bool
) -> None:
    model = build(
        num_attention_heads=12,
        num_key_value_heads=12,
        hidden_size=72,
        intermediate_size=share * ranks,
    )
    mlp = model.layers[0].mlp
    assert isinstance(mlp, MLPSpec)
    if is_fused or not is_gated:
        mlp = replace(mlp, is_gated=is_gated, up_proj=LinearSpec(("up",)))
    model = replace(model, layers=(replace(model.layers[0], mlp=mlp),))
    for rank in range(ranks):
        part = shard(model, rank, ranks).layers[0].mlp
        assert isinstance(part, MLPSpec)
        inner = list(range(rank * share, (rank + 1) * share))
        up, down = cuts_of(part)
        assert part.intermediate_size == share
        assert down == inner
        if not is_gated:
            assert up == [inner]
        elif is_fused:
            assert up == [inner + [share * ranks + index for index in inner]]
        else:
            assert up == [inner, inner]


@settings(max_examples=num_examples(40, 300), deadline=None)
@given(st.integers(1, 400), st.integers(2, 8))
def test_the_vocabulary_is_divided(size: int, ranks: int) -> None:
    """Whatever its size, in parts as large as the first, the last as large as the rest."""
    heads = 8 * ranks
    model = build(
        vocab_size=size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=2 * heads,
        intermediate_size=ranks,
    )
    if (reason := unsupported_shard_reason(model, ranks)) is not None:
        assert f"vocab_size is {size}" in reason
        assert (ranks - 1) * -(-size // ranks) >= size
        return
    parts = [shard(model, rank, ranks) for rank in range(ranks)]
    cuts = [part.embedding.rows for part in parts]
    assert cuts == [part.head.rows for part in parts]
    indices = [held(cut) for cut in cuts if cut is not None]
    assert [index for part in indices for index in part] == list(range(size))
    assert {len(part) for part in indices[:-1]} <= {-(-size // ranks)}
    assert all(part.vocab_size == size for part in parts)


def test_one_rank_has_the_model_itself() -> None:
    model = build()
    assert shard(model, 0, 1) is model


def test_equal_layers_stay_one_object() -> None:
    part = shard(build(), 1, 4)
    assert part.layers[0] is part.layers[1]
    assert (part.rank, part.ranks) == (1, 4)


def test_experts_are_summed_once() -> None:
    mlp = shard(build("Qwen2MoeForCausalLM"), 1, 4).layers[0].mlp
    assert isinstance(mlp, ExpertsSpec)
    assert mlp.is_summed
    assert mlp.shared_expert is not None
    for block, size in ((mlp.expert, 24), (mlp.shared_expert, 40)):
        assert not block.down_proj.is_summed
        assert block.down_proj.columns == DimensionShard(size, ((size // 4, size // 2),))
    assert not mlp.router.rows
    assert mlp.shared_expert_gate is not None
    assert not mlp.shared_expert_gate.rows


def test_latent_attention_is_divided_by_heads() -> None:
    model = read(PUBLISHED["deepseek-v3"])
    whole, part = (m.layers[0].attention for m in (model, shard(model, 3, 8)))
    assert isinstance(whole, LatentAttentionSpec)
    assert isinstance(part, LatentAttentionSpec)
    assert part.num_heads == 16
    assert part.q_proj.rows == (DimensionShard(128 * 192, ((3 * 16 * 192, 4 * 16 * 192),)),)
    assert part.kv_up_proj.rows == (DimensionShard(128 * 256, ((3 * 16 * 256, 4 * 16 * 256),)),)
    assert part.out_proj.columns == DimensionShard(128 * 128, ((3 * 16 * 128, 4 * 16 * 128),))
    assert part.kv_entry == whole.kv_entry
    assert (part.kv_down_proj, part.q_down_proj) == (whole.kv_down_proj, whole.q_down_proj)


REFUSED: dict[str, tuple[ModelSpec, int, str]] = {
    "heads": (
        build(num_attention_heads=14, num_key_value_heads=2, hidden_size=56),
        4,
        "tensor_parallel_size is 4, but num_attention_heads is 14, which 4 ranks cannot divide "
        "equally: use 1 or 2",
    ),
    "KV heads": (
        build(num_attention_heads=12, num_key_value_heads=3, hidden_size=48),
        2,
        "tensor_parallel_size is 2, but num_key_value_heads is 3, neither a multiple nor a "
        "divisor of 2: use 1, 3, 6 or 12",
    ),
    "inner size": (
        build(intermediate_size=90),
        4,
        "tensor_parallel_size is 4, but intermediate_size is 90, which 4 ranks cannot divide "
        "equally: use 1 or 2",
    ),
    "experts": (
        build("Qwen2MoeForCausalLM", moe_intermediate_size=25),
        2,
        "tensor_parallel_size is 2, but intermediate_size of the experts is 25, which 2 ranks "
        "cannot divide equally: use 1",
    ),
    "shared expert": (
        build("Qwen2MoeForCausalLM", shared_expert_intermediate_size=42),
        8,
        "tensor_parallel_size is 8, but intermediate_size of the shared expert is 42, which 8 "
        "ranks cannot divide equally: use 1 or 2",
    ),
    "vocabulary": (
        build(vocab_size=9),
        4,
        "tensor_parallel_size is 4, but vocab_size is 9, which leaves the last of 4 ranks without "
        "tokens: use 1 or 2",
    ),
}


@pytest.mark.parametrize(("model", "ranks", "message"), REFUSED.values(), ids=[*REFUSED])
def test_refusals_name_the_size_and_what_would_do(
    model: ModelSpec, ranks: int, message: str
) -> None:
    assert unsupported_shard_reason(model, ranks) == message
    with pytest.raises(ValueError, match="tensor_parallel_size") as error:
        shard(model, 0, ranks)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "block", "ranks", "named"),
    [
        ({"head_dim": 4}, (16, 16), 4, "num_attention_heads is 8: a part of self_attn.q_proj"),
        ({"head_dim": 8}, (16, 16), 4, "num_key_value_heads is 4: a part of self_attn.k_proj"),
        ({"head_dim": 8}, (8, 32), 4, "num_attention_heads is 8: a part of self_attn.o_proj"),
        ({"head_dim": 16}, (16, 16), 4, "intermediate_size is 240: a part of mlp.gate_proj"),
        ({"head_dim": 16}, (4, 16), 4, "intermediate_size is 240: a part of mlp.down_proj"),
    ],
)
def test_blocks_with_one_scale_are_not_split(
    changes: dict[str, Any], block: tuple[int, int], ranks: int, named: str
) -> None:
    model = replace(build(**changes), quantization=QuantizationSpec("fp8", block))
    message = unsupported_shard_reason(model, ranks)
    assert message is not None
    assert message.startswith(f"tensor_parallel_size is {ranks}, but {named}")
    assert f"split blocks of {block[0]} x {block[1]} weights" in message
    numbers = message.rpartition(": use ")[2].replace(" or ", ", ").split(", ")
    assert ranks not in map(int, numbers)
    assert all(unsupported_shard_reason(model, int(number)) is None for number in numbers)
    without_blocks = replace(model, quantization=QuantizationSpec("fp8", None))
    assert unsupported_shard_reason(without_blocks, ranks) is None


@pytest.mark.parametrize("ranks", [2, 8, pytest.param(4, marks=pytest.mark.full)])
def test_published_models_divide_or_say_why(ranks: int) -> None:
    for raw in PUBLISHED.values():
        model = read(raw)
        attention = model.layers[0].attention
        reason = unsupported_shard_reason(model, ranks)
        if reason is not None:
            assert reason.startswith(f"tensor_parallel_size is {ranks}, but ")
            assert unsupported_shard_reason(model, int(reason.split()[-1])) is None
            continue
        parts = [shard(model, rank, ranks).layers[0].attention for rank in range(ranks)]
        has_channels = isinstance(attention, ShortConvSpec | Mamba1Spec)
        name = "num_channels" if has_channels else "num_heads"
        assert sum(getattr(part, name) for part in parts) == getattr(attention, name)
        shares = [part.kv_entry.num_elements * ranks for part in parts]
        assert min(shares) >= attention.kv_entry.num_elements
