"""Broken values in configuration and index files: an error that names the field, nothing else."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.kernels.rotary import compute_inverse_frequencies
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.model import ModelSpec
from tests.models.test_popular import POPULAR
from tests.support.engines.pipeline import Pipeline
from tests.support.models.published import PUBLISHED, Config, read
from tests.support.models.tiny_models import save

EVERY = {**PUBLISHED, **{name: row["config"] for name, row in POPULAR.items()}}
BROKEN: tuple[Any, ...] = (0, 2.5, math.nan, "7", [1])
MORE_BROKEN: tuple[Any, ...] = (
    -1,
    1,
    10**12,
    10**400,
    math.inf,
    1e-300,
    True,
    {"a": 1},
    [[]],
)
IGNORED = {"transformers_version", "architectures", "model_type", "dtype", "torch_dtype"}
PER_ARCHITECTURE = {raw["architectures"][0]: name for name, raw in EVERY.items()} | {
    "yarn": "deepseek-v2-lite",
    "longrope": "phi-3-mini-128k",
    "llama3": "llama-3.1-8b",
    "linear": "deepseek-coder-6.7b-instruct",
}


def broken(raw: Config, values: tuple[Any, ...]) -> Iterator[tuple[str, Any, Config]]:
    """Each key, top-level or of an object within, with each broken value."""
    for key, value in raw.items():
        if key in IGNORED:
            continue
        for wrong in values:
            yield key, wrong, raw | {key: wrong}
        if key == "rope_scaling" and isinstance(value, dict):
            for inner in value:
                for wrong in values:
                    yield inner, wrong, raw | {key: value | {inner: wrong}}


def read_or_refusal(raw: Config) -> tuple[ModelSpec | None, str]:
    try:
        return read(raw), ""
    except ModelError as error:
        return None, str(error)


def check_computable(model: ModelSpec) -> None:
    """Everything that is computed from numbers of the file alone is finite."""
    for layer in {layer.attention for layer in model.layers}:
        if isinstance(layer, AttentionSpec | LatentAttentionSpec):
            assert math.isfinite(layer.scale)
            assert layer.scale > 0
        rope = layer.rope
        if rope is not None and rope.dim <= 4096:
            parameters = {**rope.parameters, "longest": 8192}
            frequencies, factor = compute_inverse_frequencies(
                rope.kind, rope.dim, rope.theta, parameters
            )
            assert bool(torch.isfinite(frequencies).all())
            assert math.isfinite(factor)
    assert 0 < model.context_length < 2**31


@pytest.mark.parametrize(
    "values", [BROKEN, pytest.param(MORE_BROKEN, marks=pytest.mark.full)], ids=["few", "more"]
)
@pytest.mark.parametrize("architecture", PER_ARCHITECTURE)
def test_a_broken_value_is_refused_by_name_or_harmless(
    architecture: str, values: tuple[Any, ...]
) -> None:
    raw = EVERY[PER_ARCHITECTURE[architecture]]
    for key, wrong, changed in broken(raw, values):
        model, refusal = read_or_refusal(copy.deepcopy(changed))
        if model is not None:
            check_computable(model)
            continue
        # A relation between two keys may be told by the other one.
        assert key in refusal or any(other in refusal for other in raw), (key, wrong)
        assert len(refusal) < 500, key


NO_KV_HEADS = {str(layer): {"num_key_value_heads": 0} for layer in range(5, 48, 6)}
LISTED: list[tuple[str, Config, str]] = [
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9.* 8"),
    ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129.* 128"),
    ("qwen3-30b-a3b", {"mlp_only_layers": 5}, "mlp_only_layers is 5"),
    ("qwen3-30b-a3b", {"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
    ("qwen2.5-7b", {"max_window_layers": "2"}, "max_window_layers is '2'"),
    ("ernie-4.5-21b-a3b-pt", {"moe_num_experts": 1}, "moe_num_experts is 1"),
    ("hunyuan-a13b-instruct", {"moe_topk": [8, 9]}, "moe_topk is .8, 9"),
    ("hunyuan-a13b-instruct", {"moe_topk": 65}, "moe_topk is 65.*num_experts is 64"),
    ("falcon-h1-0.5b-instruct", {"mamba_d_head": {"a": 1}}, "mamba_d_head is .'a': 1"),
    ("granite-4.0-h-tiny", {"mamba_d_head": 3}, "mamba_d_head is 3.*mamba_n_heads"),
    ("minimax-m2", {"rotary_dim": 130}, "rotary_dim is 130.*head_dim 128"),
    ("pythia-1.4b", {"rotary_pct": 1e-300}, "rotary_pct 1e-300"),
    ("pythia-1.4b", {"rotary_emb_base": 0.5}, "rotary_emb_base is 0.5"),
    ("gemma-4-12b-text", {"per_layer_config": NO_KV_HEADS}, "num_key_value_heads is 0"),
    ("gemma-4-12b-text", {"per_layer_config": dict.fromkeys(NO_KV_HEADS, 5)}, "per_layer_config"),
    ("deepseek-v3", {"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
    ("deepseek-v3", {"n_group": 7}, "n_group is 7.*256"),
    ("deepseek-v3", {"topk_group": 9}, "topk_group is 9.* 8"),
    ("deepseek-v3", {"n_group": 256}, "n_group is 256"),
    ("deepseek-v3", {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33.* 32"),
    ("deepseek-v3", {"n_shared_experts": "1"}, "n_shared_experts is '1'"),
    ("deepseek-v3", {"q_lora_rank": -5}, "q_lora_rank is -5"),
    ("deepseek-v3", {"first_k_dense_replace": 1.0}, "first_k_dense_replace is 1.0"),
    ("gemma-2-9b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma-2-9b", {"query_pre_attn_scalar": -256}, "query_pre_attn_scalar is -256"),
    ("gemma-2-9b", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
    ("deepseek-v3", {"rope_theta": 1}, "rope_theta is 1"),
    ("llama-2-7b", {"rope_theta": math.inf}, "rope_theta is inf"),
    ("llama-2-7b", {"rope_theta": math.nan}, "rope_theta is nan"),
    ("llama-2-7b", {"rope_parameters": {"rope_theta": math.inf}}, "rope_theta is inf"),
    ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor is inf"),
    ("llama-2-7b", {"rope_scaling": {"type": ["linear"], "factor": 2}}, "rope_type"),
    ("llama-2-7b", {"rope_scaling": 5}, "rope_scaling is 5"),
    ("llama-2-7b", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("llama-2-7b", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ("llama-2-7b", {"num_attention_heads": 5000}, "num_attention_heads 5000.*hidden_size 4096"),
    ("glm-4-9b-chat-hf", {"partial_rotary_factor": "0.5"}, "partial_rotary_factor is '0.5'"),
    ("gemma-3-1b-it", {"layer_types": [["full_attention"]] * 26}, "layer_types"),
    ("gemma-3-1b-it", {"rope_parameters": 5, "rope_scaling": None}, "rope_parameters is 5"),
    ("chatglm3-6b", {"kv_channels": 126}, "kv_channels"),
    ("chatglm3-6b", {"rope_ratio": 0}, "rope_ratio is 0"),
    ("llama-2-7b", {"architectures": [["x"]]}, "architectures"),
]


@pytest.mark.parametrize(("name", "changes", "named"), LISTED, ids=str)
def test_listed_values_are_refused_by_name(name: str, changes: Config, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(PUBLISHED[name] | changes)


LLAMA3 = PUBLISHED["llama-3.1-8b"]["rope_scaling"]
YARN = PUBLISHED["deepseek-v3"]["rope_scaling"]
SCALINGS: list[tuple[str, Config, str]] = [
    ("llama-3.1-8b", LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor"),
    ("llama-3.1-8b", LLAMA3 | {"low_freq_factor": -1.0}, "low_freq_factor"),
    ("deepseek-v3", YARN | {"beta_fast": 0}, "beta_fast"),
    ("deepseek-v3", YARN | {"beta_slow": -1}, "beta_slow"),
    ("deepseek-v3", YARN | {"mscale": -1}, "mscale"),
    ("deepseek-v3", YARN | {"truncate": 2}, "truncate"),
    ("deepseek-v3", YARN | {"factor": True}, "factor"),
    ("deepseek-v3", YARN | {"factor": 1e30}, "factor"),
    ("deepseek-v3", YARN | {"original_max_position_embeddings": 2.5}, "original_max"),
]


@pytest.mark.parametrize(("name", "scaling", "named"), SCALINGS, ids=str)
def test_parameters_of_rotary_scalings_are_checked(name: str, scaling: Config, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(PUBLISHED[name] | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "5",
        "null",
        "{}",
        "{",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "/x.safetensors"}}',
    ],
)
def test_broken_index_files_are_named(content: str, tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path, shard="30KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json.*weight_map|index\.json cannot be read"):
        Pipeline(folder)


@pytest.mark.parametrize("dtype", [5, ["float32"], {}, "float64", True])
def test_broken_types_are_named(dtype: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama-2-7b"] | {"dtype": dtype}))
    with pytest.raises(ModelError, match="dtype"):
        read_config(tmp_path)
