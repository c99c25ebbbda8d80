"""Published configurations: read as they are, as newer libraries write them, with keys left out."""

import copy
import math
import subprocess
import sys

import pytest
import torch

from gllm.models.errors import ModelError
from gllm.models.registry import ARCHITECTURES
from gllm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
)
from gllm.models.split import layer_costs, split_layers
from gllm.runtime.worker.kv_cache import KVCache, block_bytes
from tests.support.full_cases import full_but
from tests.support.models.published import PUBLISHED, Config, read


def grouped(model: ModelSpec) -> AttentionSpec:
    attention = model.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def latent(model: ModelSpec) -> LatentAttentionSpec:
    attention = model.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    return attention


def experts(model: ModelSpec) -> ExpertsSpec:
    mlp = model.layers[-1].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp


SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "llama-2-7b": (32, 32, 32, 128, 4096),
    "llama-3.1-8b": (32, 32, 8, 128, 131072),
    "mistral-7b-v0.1": (32, 32, 8, 128, 32768),
    "mixtral-8x7b": (32, 32, 8, 128, 32768),
    "qwen-7b-chat": (32, 32, 32, 128, 8192),
    "qwen2.5-7b": (28, 28, 4, 128, 32768),
    "qwen1.5-moe-a2.7b": (24, 16, 16, 128, 8192),
    "qwen3-4b": (36, 32, 8, 128, 40960),
    "qwen3-30b-a3b": (48, 32, 4, 128, 40960),
    "gemma-2b": (18, 8, 1, 256, 8192),
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
    "deepseek-moe-16b": (28, 16, 16, 128, 4096),
}
"""Layers, heads, KV heads, elements of a head, context length."""


def test_every_architecture_and_file_is_in_the_tables() -> None:
    named = {name for raw in PUBLISHED.values() for name in raw["architectures"]}
    # Other names of families that are in the table under one.
    others = {"BaiChuanForCausalLM", "ChatGLMForCausalLM", "ChatGLMForConditionalGeneration"}
    assert set(ARCHITECTURES) - named == others
    assert set(PUBLISHED) - set(SHAPES) == {"deepseek-v2-lite", "deepseek-v3"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("baichuan2-7b", "BaiChuanForCausalLM"),
        ("chatglm3-6b", "ChatGLMForCausalLM"),
        ("chatglm3-6b", "ChatGLMForConditionalGeneration"),
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
    "gemma-2-9b",
    "gemma-3-1b-it",
    "phi-4-mini",
    "command-r",
    "command-r7b",
    "gpt2",
    "gpt2-medium",
    "opt-1.3b",
    "bloom-560m",
    "falcon-7b",
    "falcon-40b",
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
    biased = read(raw | {"no_bias": False}).layers[0]
    assert biased.attention.out_proj.has_bias
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


FOREIGN = {"chatglm", "baichuan", "qwen", "deepseek"}
"""Formats that transformers has no class for."""
LIBRARY = [name for name, raw in PUBLISHED.items() if raw["model_type"] not in FOREIGN]


def rewritten(raw: Config) -> Config:
    """A configuration as the library at hand would write it."""
    import transformers

    keys = {key: value for key, value in copy.deepcopy(raw).items() if key != "auto_map"}
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
