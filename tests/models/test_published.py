"""Published configurations: read as they are, as newer libraries write them, with keys left out."""

import copy
import math
import subprocess
import sys

import pytest
import torch

from gllm.kernels.attention_window import AttentionWindow
from gllm.models.errors import ModelError
from gllm.models.registry import ARCHITECTURES
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.recurrent import KimiDeltaSpec
from gllm.models.split import layer_costs, split_layers
from gllm.runtime.worker.kv_cache import KVCache, block_bytes
from tests.support.full_cases import full_but
from tests.support.models.published import PUBLISHED, Config, read


def grouped(model: ModelSpec) -> AttentionSpec:
    """The attention of the first layer that is not recurrent."""
    blocks = (block for layer in model.layers for block in layer.mixers)
    return next(block for block in blocks if isinstance(block, AttentionSpec))


def latent(model: ModelSpec) -> LatentAttentionSpec:
    attention = model.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    return attention


def experts(model: ModelSpec) -> ExpertsSpec:
    mlp = model.layers[-1].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp


def experts_of_all(model: ModelSpec) -> ExpertsSpec:
    """The experts of the first layer that has any."""
    return next(layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsSpec))


SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "llama-2-7b": (32, 32, 32, 128, 4096),
    "llama-3.1-8b": (32, 32, 8, 128, 131072),
    "mistral-7b-v0.1": (32, 32, 8, 128, 32768),
    "ministral-3-8b": (34, 32, 8, 128, 262144),
    "mixtral-8x7b": (32, 32, 8, 128, 32768),
    "qwen-7b-chat": (32, 32, 32, 128, 8192),
    "qwen2.5-7b": (28, 28, 4, 128, 32768),
    "qwen1.5-moe-a2.7b": (24, 16, 16, 128, 8192),
    "qwen3-4b": (36, 32, 8, 128, 40960),
    "qwen3-30b-a3b": (48, 32, 4, 128, 40960),
    "qwen3-next-80b-a3b": (48, 16, 2, 256, 262144),
    "qwen3.5-9b-text": (32, 16, 4, 256, 262144),
    "qwen3.5-35b-a3b-text": (40, 16, 2, 256, 262144),
    "gemma-2b": (18, 8, 1, 256, 8192),
    "gemma-2-9b": (42, 16, 8, 256, 8192),
    "gemma-3-1b-it": (26, 4, 1, 256, 32768),
    "gemma-4-12b-text": (48, 16, 8, 256, 262144),
    "gemma-4-31b-text": (60, 32, 16, 256, 262144),
    "phi-3-mini-128k": (32, 32, 32, 96, 131072),
    "phi-4-mini": (32, 24, 8, 128, 131072),
    "command-r": (40, 64, 64, 128, 131072),
    "command-r7b": (32, 32, 8, 128, 8192),
    "gpt-oss-20b": (24, 64, 8, 64, 131072),
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
    "deepseek-moe-16b": (28, 16, 16, 128, 4096),
    "smollm3-3b": (36, 16, 4, 128, 65536),
    "olmo-2-7b": (32, 32, 32, 128, 4096),
    "olmo-3-7b-instruct": (32, 32, 32, 128, 65536),
    "olmo-7b-hf": (32, 32, 32, 128, 2048),
    "olmoe-1b-7b-0924": (16, 16, 16, 128, 4096),
    "jamba-v0.1": (32, 32, 8, 128, 262144),
    "bamba-9b-v2": (32, 32, 8, 128, 262144),
    "granite-4.0-h-tiny": (40, 12, 4, 128, 131072),
    "granite-4.0-h-micro": (40, 32, 8, 64, 131072),
    "lfm2-1.2b": (16, 32, 8, 64, 128000),
    "lfm2-8b-a1b": (24, 32, 8, 64, 128000),
    "falcon-h1-0.5b-instruct": (36, 8, 2, 64, 16384),
    "nemotron-nano-9b-v2": (56, 40, 8, 128, 131072),
    "nemotron-3-nano-30b-a3b": (52, 32, 2, 128, 262144),
    "granite-3.1-8b-instruct": (40, 32, 8, 128, 131072),
    "granite-3.1-3b-a800m-instruct": (32, 24, 8, 64, 131072),
    "moe-7b-1b-active-shared-experts": (40, 12, 4, 128, 4096),
    "seed-oss-36b-instruct": (64, 80, 8, 128, 524288),
    "ernie-4.5-0.3b-pt": (18, 16, 2, 128, 131072),
    "ernie-4.5-21b-a3b-pt": (28, 20, 4, 128, 131072),
    "exaone-4.0-32b": (64, 40, 8, 128, 131072),
    "k-exaone-236b-a23b": (48, 64, 8, 128, 262144),
    "hunyuan-7b-instruct": (32, 32, 8, 128, 32768),
    "hunyuan-a13b-instruct": (32, 32, 8, 128, 32768),
    "phi-3.5-moe-instruct": (32, 32, 8, 128, 131072),
    "starcoder2-7b": (32, 36, 4, 128, 16384),
    "internlm3-8b-instruct": (48, 32, 2, 128, 32768),
    "mimo-7b-rl": (36, 32, 8, 128, 32768),
    "stablelm-2-1.6b": (24, 32, 32, 64, 4096),
    "minitron-8b-base": (32, 48, 8, 128, 4096),
    "afm-4.5b": (36, 20, 4, 128, 81920),
    "jais-2-8b-chat": (32, 26, 26, 128, 8192),
    "glm-4.5-air": (46, 96, 8, 128, 131072),
    "minimax-text-01": (80, 64, 8, 128, 10240000),
    "minimax-text-01-hf": (80, 64, 8, 128, 10240000),
    "minimax-m2": (62, 48, 8, 128, 196608),
    "llama-4-scout-text": (48, 40, 8, 128, 10485760),
    "pythia-1.4b": (24, 16, 16, 128, 2048),
    "phi-2": (32, 32, 32, 80, 2048),
    "helium-1-2b": (28, 16, 8, 128, 4096),
    "cwm": (64, 48, 8, 128, 131072),
    "dots.llm1.inst": (62, 32, 32, 128, 32768),
    "solar-open-100b": (48, 64, 8, 128, 131072),
    "hyperclovax-seed-think-14b": (38, 48, 8, 128, 131072),
    "flexolmo-7x7b-1t": (32, 32, 32, 128, 4096),
    "vaultgemma-1b": (26, 4, 4, 256, 1024),
    "internlm2_5-7b-chat": (32, 32, 8, 128, 32768),
    "minicpm4-8b": (32, 32, 2, 128, 32768),
    "mellum2": (28, 32, 4, 128, 131072),
    "hy3": (80, 64, 8, 128, 262144),
    "apertus-8b-instruct-2509": (32, 32, 8, 128, 65536),
    "trinity-mini": (32, 32, 4, 128, 131072),
    "mimo-v2-flash": (48, 64, 4, 192, 262144),
    "gpt-j-6b": (28, 16, 16, 256, 2048),
    "gpt-neo-1.3b": (24, 16, 16, 128, 2048),
    "starcoder": (40, 48, 1, 128, 8192),
    "mpt-7b-instruct": (32, 32, 32, 128, 2048),
    "nanochat-d32": (32, 16, 16, 128, 2048),
    "granite-swash-2b": (24, 20, 4, 128, 8192),
    "granite-swash-3b-a600m": (32, 12, 4, 128, 8192),
    "command-a-plus-05-2026": (49, 32, 8, 128, 131072),
    "ministral-8b-instruct-2410": (36, 32, 8, 128, 32768),
    "lfm3-1.7b": (24, 16, 4, 128, 128000),
    "flint": (49, 32, 4, 128, 262144),
    "kolibri-1": (50, 48, 4, 128, 262144),
    "laguna-xs.2": (40, 48, 8, 128, 131072),
}


def test_every_architecture_and_file_is_in_the_tables() -> None:
    named = {name for raw in PUBLISHED.values() for name in raw["architectures"]}
    # Other names of families that are in the table under one.
    others = {"BaiChuanForCausalLM", "ChatGLMForCausalLM", "ChatGLMForConditionalGeneration"}
    assert set(ARCHITECTURES) - named == others | {
        "PhimoeForCausalLM",
        "MiniMaxM1ForCausalLM",
        "MptForCausalLM",
    }
    latent = {"deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.7-flash", "glm-5"}
    latent |= {"minicpm3-4b", "mistral-small-4-text", "youtu-llm-2b"}
    latent |= {"kimi-linear-48b-a3b-instruct", "ling-3.0-flash"}
    without = {"mamba-2.8b-hf", "falcon-mamba-7b-instruct", "mamba-codestral-7b-v0.1"}
    assert set(PUBLISHED) - set(SHAPES) == latent | without


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("baichuan2-7b", "BaiChuanForCausalLM"),
        ("minimax-text-01", "MiniMaxM1ForCausalLM"),
        ("chatglm3-6b", "ChatGLMForCausalLM"),
        ("chatglm3-6b", "ChatGLMForConditionalGeneration"),
        ("mpt-7b-instruct", "MptForCausalLM"),
        ("phi-3.5-moe-instruct", "PhimoeForCausalLM"),
    ],
)
def test_other_names_of_an_architecture_mean_the_same(name: str, other: str) -> None:
    assert read(PUBLISHED[name] | {"architectures": [other]}) == read(PUBLISHED[name])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    model = read(PUBLISHED[name])
    attention = grouped(model)
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    assert (model.num_layers, *heads, model.context_length) == SHAPES[name]


ROTATED: dict[str, tuple[str, int, float, bool]] = {
    "llama-2-7b": ("default", 128, 10_000.0, False),
    "llama-3.1-8b": ("llama3", 128, 500_000.0, False),
    "mixtral-8x7b": ("default", 128, 1_000_000.0, False),
    "gemma-2b": ("default", 256, 10_000.0, False),
    "qwen-7b-chat": ("default", 128, 10_000.0, False),
    "phi-3-mini-128k": ("longrope", 96, 10_000.0, False),
    "phi-4-mini": ("longrope", 96, 10_000.0, False),
    "gpt-oss-20b": ("yarn", 64, 150_000.0, False),
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
    assert (rope.kind, rope.dim, rope.theta, rope.is_interleaved) == ROTATED[name]


@pytest.mark.parametrize("name", ["gpt2", "opt-1.3b", "bloom-560m", "baichuan2-13b"])
def test_models_without_rotation(name: str) -> None:
    model = read(PUBLISHED[name])
    attention = grouped(model)
    assert attention.rope is None
    learned = model.embedding.positions
    assert (learned is None) == (attention.alibi_scale is not None)
    if learned is not None:
        assert learned.num_rows - learned.offset == model.context_length


def windows(name: str) -> list[AttentionWindow]:
    return [layer.attention.window for layer in read(PUBLISHED[name]).layers]


def test_windows() -> None:
    assert windows("mistral-7b-v0.1") == [4096] * 32
    assert windows("gemma-2-9b") == [4096, None] * 21
    assert windows("gemma-3-1b-it") == ([512] * 5 + [None]) * 4 + [512] * 2
    assert windows("gpt-oss-20b") == [128, None] * 12
    assert windows("command-r7b") == [4096, 4096, 4096, None] * 8
    for name in ("mixtral-8x7b", "qwen2.5-7b", "qwen1.5-moe-a2.7b", "llama-3.1-8b"):
        assert set(windows(name)) == {None}


def test_layers_with_a_window_rotate_in_their_own_way() -> None:
    gemma, cohere = read(PUBLISHED["gemma-3-1b-it"]), read(PUBLISHED["command-r7b"])
    thetas = [layer.attention.rope and layer.attention.rope.theta for layer in gemma.layers[4:6]]
    assert thetas == [10_000.0, 1_000_000.0]
    thetas = [layer.attention.rope and layer.attention.rope.theta for layer in cohere.layers[2:4]]
    assert thetas == [50_000.0, None]


def test_local_rotations_do_not_follow_the_global_theta() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    nested = {"sliding_attention": {"rope_type": "default"}, "full_attention": scaling}
    for raw in (
        PUBLISHED["gemma-3-1b-it"] | {"rope_scaling": scaling},
        PUBLISHED["gemma-3-1b-it"] | {"rope_scaling": None, "rope_parameters": nested},
    ):
        nearby, everywhere = (layer.attention.rope for layer in read(raw).layers[4:6])
        assert nearby is not None
        assert everywhere is not None
        assert (nearby.kind, nearby.theta) == ("default", 10_000.0)
        assert (everywhere.kind, everywhere.theta) == ("linear", 1_000_000.0)


def test_scales_and_caps() -> None:
    gemma = read(PUBLISHED["gemma-2-9b"])
    assert (grouped(gemma).softcap, gemma.head.softcap) == (50.0, 30.0)
    assert gemma.embedding.scale == math.sqrt(3584)
    assert read(PUBLISHED["command-r7b"]).head.scale == 0.25
    assert read(PUBLISHED["baichuan2-7b"]).head.has_normalized_rows
    first = PUBLISHED["baichuan2-7b"] | {"vocab_size": 64000, "z_loss_weight": None}
    assert not read(first).head.has_normalized_rows


TIED = {
    "qwen3-4b",
    "gemma-2b",
    "lfm3-1.7b",
    "gemma-2-9b",
    "gemma-3-1b-it",
    "gemma-4-12b-text",
    "gemma-4-31b-text",
    "phi-4-mini",
    "command-r",
    "command-r7b",
    "gpt2",
    "gpt2-medium",
    "opt-1.3b",
    "bloom-560m",
    "falcon-7b",
    "falcon-40b",
    "smollm3-3b",
    "granite-4.0-h-tiny",
    "granite-4.0-h-micro",
    "lfm2-1.2b",
    "lfm2-8b-a1b",
    "granite-3.1-8b-instruct",
    "granite-3.1-3b-a800m-instruct",
    "moe-7b-1b-active-shared-experts",
    "ernie-4.5-0.3b-pt",
    "ernie-4.5-21b-a3b-pt",
    "hunyuan-7b-instruct",
    "hunyuan-a13b-instruct",
    "starcoder2-7b",
    "youtu-llm-2b",
    "vaultgemma-1b",
    "minicpm3-4b",
    "mamba-2.8b-hf",
    "command-a-plus-05-2026",
    "gpt-neo-1.3b",
    "granite-swash-2b",
    "granite-swash-3b-a600m",
    "mpt-7b-instruct",
    "starcoder",
}


def test_heads_that_share_the_embedding() -> None:
    models = {name: read(raw) for name, raw in PUBLISHED.items()}
    shared = {name for name, model in models.items() if model.head.name == model.embedding.name}
    assert shared == TIED & PUBLISHED.keys()


def test_experts() -> None:
    mixtral = experts(read(PUBLISHED["mixtral-8x7b"]))
    assert (mixtral.num_experts, mixtral.top_k, mixtral.expert.intermediate_size) == (8, 2, 14336)
    assert (mixtral.renormalize, mixtral.shared_expert) == (True, None)
    first = experts(read(PUBLISHED["qwen1.5-moe-a2.7b"]))
    assert (first.num_experts, first.top_k, first.expert.intermediate_size, first.renormalize) == (
        60,
        4,
        1408,
        False,
    )
    assert first.shared_expert is not None
    assert (first.shared_expert.intermediate_size, first.shared_expert_gate is None) == (
        5632,
        False,
    )
    third = experts(read(PUBLISHED["qwen3-30b-a3b"]))
    assert (third.num_experts, third.top_k, third.expert.intermediate_size, third.renormalize) == (
        128,
        8,
        768,
        True,
    )
    assert third.shared_expert is None
    oss = experts(read(PUBLISHED["gpt-oss-20b"]))
    assert (oss.num_experts, oss.top_k, oss.expert.intermediate_size) == (32, 4, 2880)
    assert (oss.renormalize, oss.expert.activation) == (True, "swiglu_oai")


def test_delta_nets() -> None:
    for name in ("qwen3-next-80b-a3b", "qwen3.5-9b-text", "qwen3.5-35b-a3b-text"):
        model = read(PUBLISHED[name])
        recurrent = [layer.attention.state_entry is not None for layer in model.layers]
        assert recurrent == [True, True, True, False] * (model.num_layers // 4)
        assert model.has_state
        attention = grouped(model)
        assert attention.has_output_gate
        assert attention.rope is not None
        assert (attention.rope.dim, attention.rope.theta) == (64, 1e7)
        state = model.layers[0].attention.state_entry
        assert state is not None
        assert [part.shape for part in state.parts] == [(3, 8192), (32, 128, 128)]
        assert state.num_bytes == 4 * (3 * 8192 + 32 * 128 * 128)
        assert state.flops == 2 * 4 * 8192 + 7 * 32 * 128 * 128
        assert model.layers[0].attention.kv_entry.num_elements == 0


def test_kimi_delta_nets_and_attention_without_positions() -> None:
    model = read(PUBLISHED["kimi-linear-48b-a3b-instruct"])
    attends = [layer for layer in range(27) if model.layers[layer].attention.kv_entry.num_heads]
    assert attends == [3, 7, 11, 15, 19, 23, 26]
    attention = model.layers[3].attention
    assert isinstance(attention, LatentAttentionSpec)
    assert (attention.rope, attention.kv_entry.key_dim, attention.kv_norm.eps) == (None, 576, 1e-6)
    state = model.layers[0].attention.state_entry
    assert state is not None
    assert [part.shape for part in state.parts] == [(3, 3 * 4096), (32, 128, 128)]
    mixture = experts(model)
    assert (mixture.num_experts, mixture.top_k, mixture.renormalize) == (256, 8, True)
    assert model.context_length == 1_048_576
    ling = read(PUBLISHED["ling-3.0-flash"])
    attends = [layer for layer in range(42) if ling.layers[layer].attention.kv_entry.num_heads]
    assert attends == [5, 11, 17, 23, 29, 35, 41]
    gated, delta = ling.layers[5].attention, ling.layers[0].attention
    assert isinstance(gated, LatentAttentionSpec)
    assert isinstance(delta, KimiDeltaSpec)
    assert gated.gate_proj is not None
    assert gated.rope is not None
    assert (gated.rope.theta, delta.decay_bound, delta.is_compressed) == (6e6, -5.0, False)


def test_states_of_convolutions_and_mamba() -> None:
    for name, shapes in {
        "lfm2-1.2b": [(2, 2048)],
        "lfm2-8b-a1b": [(2, 2048)],
        "minimax-text-01": [(64, 128, 128)],
        "bamba-9b-v2": [(3, 8192 + 2 * 128), (128, 128, 64)],
        "mamba-2.8b-hf": [(3, 5120), (16, 5120)],
        "falcon-mamba-7b-instruct": [(3, 8192), (16, 8192)],
        "jamba-v0.1": [(3, 8192), (16, 8192)],
        "mamba-codestral-7b-v0.1": [(3, 8192 + 16 * 128), (128, 128, 64)],
        "granite-4.0-h-tiny": [(3, 3072 + 2 * 128), (48, 128, 64)],
        "granite-4.0-h-micro": [(3, 4096 + 2 * 128), (64, 128, 64)],
        "falcon-h1-0.5b-instruct": [(3, 1536 + 2 * 128), (24, 128, 64)],
        "nemotron-nano-9b-v2": [(3, 10240 + 16 * 128), (128, 128, 80)],
    }.items():
        entry = read(PUBLISHED[name]).layers[0].attention.state_entry
        assert entry is not None
        assert [part.shape for part in entry.parts] == shapes
    jamba = read(PUBLISHED["jamba-v0.1"]).layers
    attends = [layer for layer in range(32) if jamba[layer].attention.kv_entry.num_heads]
    assert attends == [4, 12, 20, 28]
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in jamba] == [False, True] * 16
    bamba = read(PUBLISHED["bamba-9b-v2"])
    attends = [layer for layer in range(32) if bamba.layers[layer].attention.kv_entry.num_heads]
    assert attends == [9, 18, 27]
    nano = read(PUBLISHED["nemotron-3-nano-30b-a3b"])
    blocks = [layer.mlp is not None for layer in nano.layers]
    assert (blocks[:6], sum(blocks)) == ([False, True, False, True, False, False], 23)
    assert not experts_of_all(nano).expert.is_gated
    lfm2, granite = read(PUBLISHED["lfm2-1.2b"]), read(PUBLISHED["granite-4.0-h-micro"])
    for model, mlp_size in ((lfm2, 8192), (granite, 8192)):
        mlp = model.layers[-1].mlp
        assert isinstance(mlp, MLPSpec)
        assert mlp.intermediate_size == mlp_size
    assert grouped(granite).rope is None


def test_deepseek_before_latent_attention() -> None:
    model = read(PUBLISHED["deepseek-moe-16b"])
    mixture = experts(model)
    assert mixture.shared_expert is not None
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in model.layers] == [False] + [True] * 27
    assert (mixture.num_experts, mixture.top_k, mixture.num_groups) == (64, 6, 1)
    assert (mixture.scoring, mixture.renormalize, mixture.scaling_factor) == ("softmax", False, 1)
    assert (mixture.expert.intermediate_size, mixture.shared_expert.intermediate_size) == (
        1408,
        2816,
    )
    single = PUBLISHED["deepseek-moe-16b"] | {"norm_topk_prob": True}
    assert experts(read(single)).renormalize
    # The weight of the only expert is not divided by itself.
    assert not experts(read(single | {"num_experts_per_tok": 1})).renormalize


def test_gelu_of_gemma_is_its_approximation() -> None:
    raw = PUBLISHED["gemma-2b"]
    found = {
        read(raw | {"hidden_act": name}).layers[0].mlp
        for name in (None, "gelu", "gelu_pytorch_tanh")
    }
    (mlp,) = found
    assert isinstance(mlp, MLPSpec)
    assert mlp.activation == "gelu_tanh"
    assert read(raw).embedding.scale == math.sqrt(2048)
    norms = read(raw).norm, read(raw).layers[0].attention_norm, read(raw).layers[0].mlp_norm
    assert [norm and norm.offset for norm in norms] == [1.0] * 3


def test_qwen_ends_texts_where_attention_changes() -> None:
    raw = PUBLISHED["qwen-7b-chat"]
    model = read(raw)
    assert model.context_length == 8192
    assert "seq_length 8192" in model.notes[0]
    mlp = model.layers[0].mlp
    assert isinstance(mlp, MLPSpec)
    # Half of intermediate_size each; the second is the gate.
    assert (mlp.intermediate_size, mlp.up_proj.names) == (11008, ("mlp.w2", "mlp.w1"))
    always = raw | {"use_dynamic_ntk": False, "use_logn_attn": False}
    assert (read(always).context_length, read(always).notes) == (32768, ())
    assert read(raw | {"use_logn_attn": False}).context_length == 8192
    model = read(raw | {"no_bias": False})
    biased = model.layers[0]
    assert grouped(model).out_proj.has_bias
    assert isinstance(biased.mlp, MLPSpec)
    assert biased.mlp.down_proj.has_bias


def test_deepseek() -> None:
    lite, large = read(PUBLISHED["deepseek-v2-lite"]), read(PUBLISHED["deepseek-v3"])
    dense = [
        [isinstance(layer.mlp, ExpertsSpec) for layer in m.layers].index(True)
        for m in (lite, large)
    ]
    assert (dense, lite.num_layers, large.num_layers) == ([1, 3], 27, 61)
    assert lite.context_length == large.context_length == 163840
    assert (latent(lite).q_down_proj, latent(lite).q_input_size) == (None, 2048)
    assert latent(large).q_input_size == 1536
    # YaRN's temperature for a stretch of 40, on scores of 128 + 64 elements.
    assert latent(lite).scale == pytest.approx((0.0707 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert latent(large).scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    one, other = experts(lite), experts(large)
    assert one.shared_expert is not None
    assert other.shared_expert is not None
    assert (
        one.num_experts,
        one.top_k,
        one.num_groups,
        one.scoring,
        one.shared_expert.intermediate_size,
    ) == (
        64,
        6,
        1,
        "softmax",
        2 * 1408,
    )
    assert (other.num_experts, other.top_k, other.num_groups, other.top_k_groups) == (256, 8, 8, 4)
    assert (other.scoring, other.scaling_factor, other.shared_expert.intermediate_size) == (
        "sigmoid",
        2.5,
        2048,
    )
    assert other.group_scoring == "best two"


FOREIGN = {"chatglm", "baichuan", "qwen", "deepseek", "mimo", "internlm2", "minicpm"}
FOREIGN |= {"minimax_text_01"}
"""Formats that transformers has no class for."""
LIBRARY = [name for name, raw in PUBLISHED.items() if raw["model_type"] not in FOREIGN]


def rewritten(raw: Config) -> Config:
    """A configuration as the library at hand would write it."""
    import transformers

    # Classes of models without positions warn of rope_scaling.
    left_out = ("auto_map", *([] if raw.get("rope_scaling") else ["rope_scaling"]))
    keys = {key: value for key, value in copy.deepcopy(raw).items() if key not in left_out}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    return config.to_dict() | {"architectures": raw["architectures"]}


def test_newer_files_say_the_same() -> None:
    for name in LIBRARY:
        assert read(PUBLISHED[name]) == read(rewritten(PUBLISHED[name])), name


TYPES = {PUBLISHED[name]["model_type"]: name for name in LIBRARY}
ONE_PER_TYPE = pytest.mark.parametrize("name", full_but(TYPES.values(), LIBRARY))
"""One model of each type in every run, the others in `make test-all`."""


def read_or_refusal(raw: Config) -> ModelSpec | str:
    try:
        return read(raw)
    except ModelError as error:
        return str(error)


@ONE_PER_TYPE
def test_what_a_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    """But for the number of KV heads, which the shapes of tensors tell; what has to be there is
    refused by name instead."""
    whole = PUBLISHED[name]
    for key in whole.keys() - {"architectures", "model_type", "num_key_value_heads"}:
        raw = {other: value for other, value in whole.items() if other != key}
        found = read_or_refusal(raw)
        if isinstance(found, ModelSpec):
            assert found == read(rewritten(raw)), key
        else:
            # Factors of longrope fit no other number of pairs.
            assert key in found or "pairs are rotated" in found


@ONE_PER_TYPE
def test_null_in_a_file_is_what_transformers_takes(name: str) -> None:
    """For keys of older files too, where transformers accepts null; test_nulls.py computes."""
    whole = PUBLISHED[name]
    for key in whole.keys() - {"architectures", "model_type"}:
        raw = whole | {key: None}
        try:
            written = rewritten(raw)
        except Exception:  # its checks raise many kinds of errors
            continue
        found = read_or_refusal(raw)
        if isinstance(found, ModelSpec):
            assert found == read(written), key
        else:
            assert key in found or "pairs are rotated" in found


OLD_LIBRARY: Config = {
    "add_cross_attention": False,
    "bad_words_ids": None,
    "cross_attention_hidden_size": None,
    "do_sample": False,
    "early_stopping": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "max_length": 20,
    "num_beams": 1,
    "output_scores": False,
    "pruned_heads": {},
    "repetition_penalty": 1.0,
    "return_dict": True,
    "suppress_tokens": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "top_k": 50,
    "torchscript": False,
    "typical_p": 1.0,
}
"""What transformers 4 added to a file that it wrote without leaving out defaults."""


def test_defaults_of_older_libraries_change_nothing() -> None:
    for name, raw in PUBLISHED.items():
        assert read(raw | OLD_LIBRARY) == read(raw), name


def test_families_are_described_without_torch() -> None:
    modules = {value.split(":")[0] for value in ARCHITECTURES.values()}
    imports = ", ".join(f"gllm.models.families.{module}" for module in sorted(modules))
    code = f"import sys, {imports}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def cached_bytes(layers: tuple[LayerSpec, ...], blocks: int, size: int) -> int:
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
    costs = layer_costs(model).layers
    assert costs[dense - 1] == pytest.approx(costs[dense], rel=0.03)
    counts = [len(layers) for layers in split_layers(model, 4)]
    assert max(counts) - min(counts[:-1]) <= 1
    assert counts[-1] < counts[0]
