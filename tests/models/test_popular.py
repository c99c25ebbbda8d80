"""Popular models' configurations: loaded as published, or refused by their architecture."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gllm.models.errors import ModelError
from gllm.models.spec.model import ModelSpec
from tests.support.models.published import PUBLISHED, Config, read

POPULAR: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "popular_configs.json").read_text()
)
"""Contents of files by model, with the shape: layers, heads, cached heads, elements of a key,
context length."""


def test_there_are_fifty() -> None:
    assert len(POPULAR.keys() - PUBLISHED.keys()) >= 50


def shape(model: ModelSpec) -> list[int]:
    attention = model.layers[0].attention
    cached = attention.kv_entry
    return [
        model.num_layers,
        attention.num_heads,
        cached.num_heads,
        cached.key_dim,
        model.context_length,
    ]


def test_loads_as_published() -> None:
    shapes = {name: shape(read(row["config"])) for name, row in POPULAR.items()}
    assert shapes == {name: row["shape"] for name, row in POPULAR.items()}


TYPES = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, and those of which they are."""
LIBRARY = [
    name
    for name in POPULAR
    if POPULAR[name]["config"]["model_type"]
    not in ("chatglm", "baichuan", "qwen", "kimi_vl", "phi4mm")
]


def test_loads_as_transformers_writes_it() -> None:
    import transformers

    for name in LIBRARY:
        raw = {key: value for key, value in POPULAR[name]["config"].items() if key != "auto_map"}
        keys = copy.deepcopy(raw)
        kind = keys.pop("model_type")
        config = transformers.AutoConfig.for_model(TYPES.get(kind, kind), **keys)
        written = config.to_dict() | {"architectures": raw["architectures"]}
        ours, theirs = read(raw), read(written)
        if "text_config" in raw and "tie_word_embeddings" not in raw:
            # Whether the head is tied, the tensors tell.
            theirs = replace(theirs, head=ours.head)
        assert ours == theirs, name


ABSENT = {
    "codegen-350m": "CodeGenForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "dbrx-instruct": "DbrxForCausalLM",
    "rwkv-4-169m": "RwkvForCausalLM",
    "bert-base-uncased": "BertForMaskedLM",
    "t5-small": "T5ForConditionalGeneration",
}


def test_other_architectures_are_refused_by_name() -> None:
    for architecture in ABSENT.values():
        with pytest.raises(ModelError, match=architecture):
            read({"architectures": [architecture], "hidden_size": 64})


EVERY = {**PUBLISHED, **{name: row["config"] for name, row in POPULAR.items()}}
HARMLESS: Config = {
    "brand_new": None,
    "attn_implementation": "flash_attention_2",
    "quantization": None,
    "quantization_config": None,
    "rope_interleaved": False,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": None,
    "output_past": True,
}


def test_values_that_ask_for_nothing_change_nothing() -> None:
    for name, raw in EVERY.items():
        changes = {key: value for key, value in HARMLESS.items() if key not in raw}
        if raw["model_type"] in ("llama", "opt", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
            changes |= {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
        assert read(raw | changes) == read(raw), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_interleaved", True),
        ("qkv_bias", True),
        ("shared_expert_intermediate_size", 512),
        ("mlp_only_layers", [0]),
        ("use_qk_norm", True),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["sliding_attention"] * 32),
        ("quantization", {"bits": 4}),
        ("layer_types", []),
        ("layer_types", "full_attention"),
        ("brand_new", False),
    ],
    ids=str,
)
def test_the_same_keys_with_other_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read(PUBLISHED["llama-2-7b"] | {key: value})


def test_qwen3_without_its_norms_is_refused() -> None:
    for name in ("qwen3-0.6b", "qwen3-coder-30b-a3b-instruct"):
        with pytest.raises(ModelError, match="use_qk_norm False"):
            read(POPULAR[name]["config"] | {"use_qk_norm": False})
