"""Published configurations: read as they are, as newer libraries write them, with keys left out.
And what each family refuses."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gllm.models.describe import ROPE_KEYS
from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.registry import ARCHITECTURES, architecture_of, family
from gllm.models.spec import Attention, Experts, LatentAttention, Layer, Model
from gllm.models.split import layer_costs, split_layers
from gllm.runtime.kv_cache import KVCache, block_bytes

Config = dict[str, Any]
PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_configs.json").read_text()
)
"""Files with the keys that were written at their time; lists of rotary factors are made up."""


def read(raw: Config) -> Model:
    keys = Keys(copy.deepcopy(raw))
    model = family(architecture_of(raw["architectures"]))(keys)
    keys.finish()
    return model


def grouped(model: Model, layer: int = 0) -> Attention:
    attention = model.layers[layer].attention
    assert isinstance(attention, Attention)
    return attention


def latent(model: Model) -> LatentAttention:
    attention = model.layers[0].attention
    assert isinstance(attention, LatentAttention)
    return attention


def experts(model: Model, layer: int = -1) -> Experts:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, Experts)
    return mlp


SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "llama-2-7b": (32, 32, 32, 128, 4096),
    "llama-3.1-8b": (32, 32, 8, 128, 131072),
    "mistral-7b-v0.1": (32, 32, 8, 128, 32768),
    "mixtral-8x7b": (32, 32, 8, 128, 32768),
    "qwen2.5-7b": (28, 28, 4, 128, 32768),
    "qwen1.5-moe-a2.7b": (24, 16, 16, 128, 8192),
    "qwen3-4b": (36, 32, 8, 128, 40960),
    "qwen3-30b-a3b": (48, 32, 4, 128, 40960),
    "gemma-2-9b": (42, 16, 8, 256, 8192),
    "gemma-3-1b-it": (26, 4, 1, 256, 32768),
    "phi-3-mini-128k": (32, 32, 32, 96, 131072),
    "phi-4-mini": (32, 24, 8, 128, 131072),
    "command-r": (40, 64, 64, 128, 131072),
    "command-r7b": (32, 32, 8, 128, 8192),
    "gpt2": (12, 12, 12, 64, 1024),
    "gpt2-medium": (24, 16, 16, 64, 1024),
    "opt-1.3b": (24, 32, 32, 64, 2048),
    "bloom-560m": (24, 16, 16, 64, 2048),
    "falcon-7b": (32, 71, 1, 64, 2048),
    "falcon-40b": (60, 128, 8, 64, 2048),
    "chatglm3-6b": (28, 32, 2, 128, 8192),
    "glm-4-9b-chat": (40, 32, 2, 128, 131072),
    "glm-4-9b-chat-hf": (40, 32, 2, 128, 131072),
    "glm-4-9b-0414": (40, 32, 2, 128, 32768),
    "baichuan2-7b": (32, 32, 32, 128, 4096),
    "baichuan2-13b": (40, 40, 40, 128, 4096),
}
"""Layers, heads, KV heads, elements of a head, context length."""


def test_every_architecture_and_file_is_in_the_tables() -> None:
    named = {name for raw in PUBLISHED.values() for name in raw["architectures"]}
    # Other names of families that are in the table under one.
    assert set(ARCHITECTURES) - named == {"BaiChuanForCausalLM", "ChatGLMForConditionalGeneration"}
    assert set(PUBLISHED) - set(SHAPES) == {"deepseek-v2-lite", "deepseek-v3"}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    model = read(PUBLISHED[name])
    attention = grouped(model)
    heads = attention.heads, attention.kv_heads, attention.head_dim
    assert (model.num_layers, *heads, model.context_length) == SHAPES[name]


ROTATED: dict[str, tuple[str, int, float, bool]] = {
    "llama-2-7b": ("default", 128, 10_000.0, False),
    "llama-3.1-8b": ("llama3", 128, 500_000.0, False),
    "mixtral-8x7b": ("default", 128, 1_000_000.0, False),
    "phi-3-mini-128k": ("longrope", 96, 10_000.0, False),
    "phi-4-mini": ("longrope", 96, 10_000.0, False),
    "command-r": ("default", 128, 8_000_000.0, True),
    "falcon-7b": ("default", 64, 10_000.0, False),
    "chatglm3-6b": ("default", 64, 10_000.0, True),
    "glm-4-9b-chat": ("default", 64, 5_000_000.0, True),
    "glm-4-9b-0414": ("default", 64, 10_000.0, True),
    "baichuan2-7b": ("default", 128, 10_000.0, False),
}
"""Kind, elements of a head, theta, whether neighbours are pairs."""


@pytest.mark.parametrize("name", ROTATED)
def test_rotations(name: str) -> None:
    rope = grouped(read(PUBLISHED[name])).rope
    assert rope is not None
    assert (rope.kind, rope.dim, rope.theta, rope.interleaved) == ROTATED[name]


@pytest.mark.parametrize("name", ["gpt2", "opt-1.3b", "bloom-560m", "baichuan2-13b"])
def test_models_without_rotation(name: str) -> None:
    model = read(PUBLISHED[name])
    attention = grouped(model)
    assert attention.rope is None
    learned = model.embedding.positions
    assert (learned is None) == (attention.alibi is not None)
    if learned is not None:
        assert learned.rows - learned.offset == model.context_length


def windows(name: str) -> list[int | None]:
    return [layer.attention.window for layer in read(PUBLISHED[name]).layers]


def test_windows() -> None:
    assert windows("mistral-7b-v0.1") == [4096] * 32
    assert windows("gemma-2-9b") == [4096, None] * 21
    assert windows("gemma-3-1b-it") == ([512] * 5 + [None]) * 4 + [512] * 2
    assert windows("command-r7b") == [4096, 4096, 4096, None] * 8
    for name in ("mixtral-8x7b", "qwen2.5-7b", "qwen1.5-moe-a2.7b", "llama-3.1-8b"):
        assert set(windows(name)) == {None}


def test_layers_with_a_window_rotate_in_their_own_way() -> None:
    gemma, cohere = read(PUBLISHED["gemma-3-1b-it"]), read(PUBLISHED["command-r7b"])
    thetas = [layer.attention.rope and layer.attention.rope.theta for layer in gemma.layers[4:6]]
    assert thetas == [10_000.0, 1_000_000.0]
    thetas = [layer.attention.rope and layer.attention.rope.theta for layer in cohere.layers[2:4]]
    assert thetas == [50_000.0, None]


def test_scales_and_caps() -> None:
    gemma = read(PUBLISHED["gemma-2-9b"])
    assert (grouped(gemma).softcap, gemma.head.softcap) == (50.0, 30.0)
    assert gemma.embedding.scale == math.sqrt(3584)
    assert read(PUBLISHED["command-r7b"]).head.scale == 0.25
    assert read(PUBLISHED["baichuan2-7b"]).head.unit_rows
    first = PUBLISHED["baichuan2-7b"] | {"vocab_size": 64000, "z_loss_weight": None}
    assert not read(first).head.unit_rows


TIED = {
    *("qwen3-4b", "gemma-2-9b", "gemma-3-1b-it", "phi-4-mini", "command-r", "command-r7b", "gpt2"),
    *("gpt2-medium", "opt-1.3b", "bloom-560m", "falcon-7b", "falcon-40b"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_that_share_the_embedding(name: str) -> None:
    model = read(PUBLISHED[name])
    assert (model.head.name == model.embedding.name) == (name in TIED)


def test_experts() -> None:
    mixtral = experts(read(PUBLISHED["mixtral-8x7b"]))
    assert (mixtral.count, mixtral.active, mixtral.expert.inner) == (8, 2, 14336)
    assert (mixtral.normalize, mixtral.shared) == (True, None)
    first = experts(read(PUBLISHED["qwen1.5-moe-a2.7b"]))
    assert (first.count, first.active, first.expert.inner, first.normalize) == (60, 4, 1408, False)
    assert first.shared is not None
    assert (first.shared.inner, first.shared_gate is None) == (5632, False)
    third = experts(read(PUBLISHED["qwen3-30b-a3b"]))
    assert (third.count, third.active, third.expert.inner, third.normalize) == (128, 8, 768, True)
    assert third.shared is None


def test_deepseek() -> None:
    lite, large = read(PUBLISHED["deepseek-v2-lite"]), read(PUBLISHED["deepseek-v3"])
    dense = [
        [isinstance(layer.mlp, Experts) for layer in m.layers].index(True) for m in (lite, large)
    ]
    assert (dense, lite.num_layers, large.num_layers) == ([1, 3], 27, 61)
    assert lite.context_length == large.context_length == 163840
    assert (latent(lite).query_down, latent(lite).query_rank) == (None, 2048)
    assert latent(large).query_rank == 1536
    # YaRN's temperature for a stretch of 40, on scores of 128 + 64 elements.
    assert latent(lite).scale == pytest.approx((0.0707 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert latent(large).scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    one, other = experts(lite), experts(large)
    assert one.shared is not None
    assert other.shared is not None
    assert (one.count, one.active, one.groups, one.scores, one.shared.inner) == (
        *(64, 6, 1, "softmax"),
        2 * 1408,
    )
    assert (other.count, other.active, other.groups, other.active_groups) == (256, 8, 8, 4)
    assert (other.scores, other.scale, other.shared.inner) == ("sigmoid", 2.5, 2048)
    assert other.group_score == "best two"


FOREIGN = {"chatglm", "baichuan"}
"""Formats that transformers has no class for."""
LIBRARY = [name for name, raw in PUBLISHED.items() if raw["model_type"] not in FOREIGN]


def rewritten(raw: Config) -> Config:
    """A configuration as the library at hand would write it."""
    keys = {key: value for key, value in copy.deepcopy(raw).items() if key != "auto_map"}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    return config.to_dict() | {"architectures": raw["architectures"]}


@pytest.mark.parametrize("name", LIBRARY)
def test_newer_files_say_the_same(name: str) -> None:
    assert read(PUBLISHED[name]) == read(rewritten(PUBLISHED[name]))


def read_or_refusal(raw: Config) -> Model | str:
    try:
        return read(raw)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    """But for the number of KV heads, which the shapes of tensors tell; what has to be there is
    refused by name instead."""
    whole = PUBLISHED[name]
    for key in whole.keys() - {"architectures", "model_type", "num_key_value_heads"}:
        raw = {other: value for other, value in whole.items() if other != key}
        found = read_or_refusal(raw)
        if isinstance(found, Model):
            assert found == read(rewritten(raw)), key
        else:
            # Factors of longrope fit no other number of pairs.
            assert key in found or "pairs are rotated" in found


REFUSED: list[tuple[str, Config, str]] = [
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama-2-7b", {"sliding_window": 512}, "'sliding_window'"),
    ("mistral-7b-v0.1", {"attention_bias": True}, "'attention_bias'"),
    ("mistral-7b-v0.1", {"sliding_window": "4096"}, "sliding_window is '4096'"),
    ("mixtral-8x7b", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("mixtral-8x7b", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ("qwen2.5-7b", {"use_mrope": True}, "use_mrope True"),
    ("qwen2.5-7b", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention"),
    ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "use_sliding_window True"),
    ("qwen3-4b", {"layer_types": ["chunked_attention"] * 36}, "layer_types"),
    ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window True"),
    ("gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma-2-9b", {"sliding_window_size": 2048}, "sliding_window_size 2048"),
    ("gemma-2-9b", {"hidden_activation": "tanh"}, "hidden_activation 'tanh'"),
    ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("gemma-3-1b-it", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("phi-3-mini-128k", {"lm_head_bias": True}, "lm_head_bias True"),
    ("phi-3-mini-128k", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}, "lacks"),
    ("phi-4-mini", {"full_attn_mod": 2}, "full_attn_mod 2"),
    ("phi-4-mini", {"partial_rotary_factor": 0.5}, "48 numbers, but 32 pairs"),
    ("command-r", {"rotary_pct": 0.5}, "'rotary_pct'"),
    ("command-r7b", {"rotary_pct": 0.5}, "rotary_pct 0.5"),
    ("command-r7b", {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved"),
    ("command-r7b", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ("command-r7b", {"use_parallel_block": False}, "use_parallel_block False"),
    ("command-r7b", {"layer_switch": 3}, "layer_switch 3"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
    ("gpt2", {"n_head": 7}, "n_head 7"),
    ("gpt2-medium", {"n_special": 3}, "n_special 3"),
    ("opt-1.3b", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
    ("opt-1.3b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
    ("opt-1.3b", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ("bloom-560m", {"num_attention_heads": 15}, "n_head 15"),
    ("falcon-7b", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
    ("falcon-40b", {"num_kv_heads": 7}, "num_kv_heads 7"),
    ("chatglm3-6b", {"rmsnorm": False}, "rmsnorm False"),
    ("chatglm3-6b", {"original_rope": False}, "original_rope False"),
    ("chatglm3-6b", {"post_layer_norm": False}, "post_layer_norm False"),
    ("chatglm3-6b", {"pre_seq_len": 128}, "pre_seq_len 128"),
    ("chatglm3-6b", {"quantization_bit": 4}, "quantization_bit 4"),
    ("chatglm3-6b", {"multi_query_group_num": 5}, "multi_query_group_num 5"),
    ("glm-4-9b-chat", {"num_hidden_layers": 39}, "num_hidden_layers 39"),
    ("glm-4-9b-chat-hf", {"partial_rotary_factor": 0.51}, "65 of head_dim 128"),
    ("glm-4-9b-0414", {"use_qk_norm": True}, "'use_qk_norm'"),
    ("baichuan2-7b", {"hidden_act": "swiglu"}, "hidden_act 'swiglu'"),
    (
        "baichuan2-13b",
        {"model_max_length": None},
        "max_position_embeddings or model_max_length is None",
    ),
    ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias True"),
    ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED, ids=str)
def test_refused_by_name(name: str, changes: Config, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(PUBLISHED[name] | changes)


def test_every_family_refuses_something() -> None:
    refusing = {PUBLISHED[name]["architectures"][0] for name, _, _ in REFUSED}
    assert refusing == {raw["architectures"][0] for raw in PUBLISHED.values()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_unknown_keys_are_refused(name: str) -> None:
    for changes in ({"brand_new": 1}, {"quantization_config": {"bits": 4}}):
        with pytest.raises(ModelError, match=next(iter(changes))):
            read(PUBLISHED[name] | changes)


def test_kinds_of_rotation_are_refused_in_all_families_that_rotate() -> None:
    assert "ntk" not in ROPE_KEYS
    for raw in PUBLISHED.values():
        ropes = {layer.attention.rope for layer in read(raw).layers}
        if ropes != {None} and raw["model_type"] != "chatglm":
            changed = raw | {"rope_scaling": {"type": "ntk", "factor": 2.0}}
            with pytest.raises(ModelError, match="'ntk'"):
                read(changed)


def test_families_are_described_without_torch() -> None:
    modules = {value.split(":")[0] for value in ARCHITECTURES.values()}
    imports = ", ".join(f"gllm.models.families.{module}" for module in sorted(modules))
    code = f"import sys, {imports}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def cached_bytes(layers: tuple[Layer, ...], blocks: int, size: int) -> int:
    """Bytes of memory behind a cache's tensors, each counted once."""
    cache = KVCache(layers, blocks, size, torch.bfloat16)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for pair in cache.layers
        for tensor in pair
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128),
        ("falcon-7b", 32 * 2 * 64),
        ("deepseek-v2-lite", 27 * (512 + 64)),
        ("deepseek-v3", 61 * (512 + 64)),
    ],
)
def test_kv_blocks_are_as_large_as_they_say(name: str, elements: int) -> None:
    """`elements`: of a token over all layers."""
    layers = read(PUBLISHED[name]).layers
    size = block_bytes(layers, 16, torch.bfloat16)
    assert size == 16 * elements * 2
    # One block more than can be used stays zero.
    assert cached_bytes(layers[:2], 3, 16) == 4 * size * 2 // len(layers)


@pytest.mark.parametrize(("name", "dense"), [("deepseek-v2-lite", 1), ("deepseek-v3", 3)])
def test_dense_first_layers_weigh_as_a_token_s_experts_do(name: str, dense: int) -> None:
    """These models were made so that a token costs alike in all layers: stages get as many."""
    model = read(PUBLISHED[name])
    costs = layer_costs(model)
    assert costs[dense - 1] == pytest.approx(costs[dense], rel=0.03)
    counts = [len(layers) for layers in split_layers(model, 4)]
    assert max(counts) - min(counts[:-1]) <= 1
    assert counts[-1] < counts[0]
