"""Configurations of GGUF files: those that llama.cpp's converter has written, and refusals.

converted.json has the metadata that the converter writes for tiny models of each family, and their
configurations. Where the format has no key the configuration has what readers of the format assume.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.kernels.rotary import compute_inverse_frequencies
from gllm.models.config import model_notes, read_config
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_config import build_config, build_generation_config
from gllm.models.formats.gguf_families import FAMILIES
from gllm.models.formats.gguf_header import GgufHeader
from gllm.models.registry import ARCHITECTURES
from gllm.models.spec.model import ModelSpec
from tests.support.models.gguf_files import CHARACTERS, SIZES, SMALL, write_gguf

CONVERTED = json.loads((Path(__file__).parent / "converted.json").read_text())
TOKENS = CHARACTERS | {"tokenizer.ggml.tokens": [f"token{index}" for index in range(131)]}
TOKENS |= {"tokenizer.ggml.token_type": [1] * 131, "tokenizer.ggml.scores": [0.0] * 131}


def written(tmp_path: Path, family: str, **changes: Any) -> GgufHeader:
    entry = CONVERTED[family]
    metadata = entry["metadata"] | TOKENS | changes
    file = write_gguf(tmp_path / "a.gguf", metadata, entry["architecture"], entry["tensors"])
    return GgufHeader([file])


def spec(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(tmp_path).model


@pytest.mark.parametrize("family", [name for name in CONVERTED if name != "llama3"])
def test_a_converted_file_has_the_layers_of_its_model(tmp_path: Path, family: str) -> None:
    config = build_config(written(tmp_path, family))
    assert config["architectures"] == CONVERTED[family]["config"]["architectures"]
    assert spec(tmp_path, config) == spec(tmp_path, CONVERTED[family]["config"])


def test_factors_of_llama_3_give_its_frequencies(tmp_path: Path) -> None:
    model = spec(tmp_path, build_config(written(tmp_path, "llama3")))
    original = spec(tmp_path, CONVERTED["llama3"]["config"])
    frequencies = []
    for rope in (model.layers[0].attention.rope, original.layers[0].attention.rope):
        assert rope is not None
        parameters = {**rope.parameters, "longest": model.context_length}
        frequencies.append(compute_inverse_frequencies(rope.kind, rope.dim, rope.theta, parameters))
    (ours, our_factor), (theirs, their_factor) = frequencies
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_factor == their_factor
    assert model_notes(model, 256) == []


def test_every_row_has_a_family() -> None:
    assert {family.architecture for family in FAMILIES.values()} <= ARCHITECTURES.keys()


def test_every_row_is_tested() -> None:
    # The converter of the installed llama.cpp cannot convert Baichuan.
    assert FAMILIES.keys() - {entry["architecture"] for entry in CONVERTED.values()} == {"baichuan"}


@pytest.mark.parametrize(
    ("layers", "key"), [(32, "max_position_embeddings"), (40, "model_max_length")]
)
def test_the_larger_baichuan_has_no_rotary_embedding(tmp_path: Path, layers: int, key: str) -> None:
    values = {name.replace("llama", "baichuan"): value for name, value in SIZES.items()}
    values |= CHARACTERS | {"baichuan.block_count": layers}
    file = write_gguf(tmp_path / "a.gguf", values, "baichuan", {"output.weight": []})
    config = build_config(GgufHeader([file]))
    assert config[key] == 64
    assert len(spec(tmp_path, config).layers) == layers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.block_count": None}, r"lacks the key 'llama\.block_count'"),
        ({"llama.block_count": "two"}, r"llama\.block_count is 'two', but has to be an integer"),
        ({"llama.rope.dimension_count": 2}, r"llama\.rope\.dimension_count is 2.*has to be 4"),
        ({"llama.attention.value_length": 2}, r"llama\.attention\.value_length is 2"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0.*positive"),
        ({"llama.attention.head_count_kv": [1, 2]}, r"head_count_kv differs between layers"),
        ({"llama.residual_scale": 2.0}, r"key 'llama\.residual_scale' \(2\.0\) is unknown"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "rope.scaling.type 'longrope' is not implemented",
        ),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
    ],
)
def test_a_bad_key_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = write_gguf(tmp_path / "a.gguf", SMALL | changes, rows=9)
    with pytest.raises(ModelError, match=f"a.gguf.*{said}"):
        build_config(GgufHeader([file]))


def test_harmless_and_unset_keys_are_no_error(tmp_path: Path) -> None:
    values = {"llama.vocab_size": 9, "llama.expert_count": 0, "llama.rope.scaling.finetuned": True}
    model = GgufHeader([write_gguf(tmp_path / "a.gguf", SMALL | values)])
    assert build_config(model)["architectures"] == ["LlamaForCausalLM"]


def test_layers_without_bound_are_an_error(tmp_path: Path) -> None:
    values = CONVERTED["gemma3"]["metadata"] | CHARACTERS | {"gemma3.block_count": 2**32 - 1}
    file = write_gguf(tmp_path / "a.gguf", values, "gemma3")
    with pytest.raises(ModelError, match=r"gemma3\.block_count is 4294967295.*1 to 10000"):
        build_config(GgufHeader([file]))


def test_rows_and_tokens_have_to_agree(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", rows=7)
    with pytest.raises(ModelError, match=r"has 9 tokens, but 'token_embd\.weight' 7 rows"):
        build_config(GgufHeader([file]))


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("mamba", {}, "architecture 'mamba', which is not implemented.*llama"),
        ("llama", {"general.type": "adapter"}, "is a LoRA adapter.*merged"),
        ("clip", {}, "is the image part of a model.*text model"),
        ("llama", {"general.type": "mmproj"}, "is the image part of a model"),
        ("llama", {"general.type": "imatrix"}, "statistics for quantization"),
        ("llama", {"tokenizer.ggml.tokens": None}, r"0 tensors, but no 'token_embd\.weight'"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], said: str
) -> None:
    file = write_gguf(tmp_path / "a.gguf", SMALL | changes, architecture)
    with pytest.raises(ModelError, match=said):
        build_config(GgufHeader([file]))


def test_the_end_of_a_message_does_not_end_an_answer_of_gpt_oss(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "d", "e"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 4}
    values |= {"tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 3, 3, 1, 1]}
    for missing, ids in ((None, [4, 6, 3]), ("<|call|>", [4, 5, 3])):
        values["tokenizer.ggml.tokens"] = ["x" if token == missing else token for token in tokens]
        model = GgufHeader([write_gguf(tmp_path / "a.gguf", SMALL | values)])
        assert build_generation_config(model)["eos_token_id"] == ids


def test_ends_and_sampling_are_defaults_of_generation(tmp_path: Path) -> None:
    tokens = [*CHARACTERS["tokenizer.ggml.tokens"][:6], "<|eot_id|>", "<|im_end|>", "<EOT>"]
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.1}
    values = {
        "tokenizer.ggml.tokens": tokens,
        # The last one is ordinary text in this vocabulary.
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 3, 4, 1],
        "tokenizer.ggml.eot_token_id": 5,
        **{f"general.sampling.{key}": value for key, value in sampling.items()},
    }
    model = GgufHeader([write_gguf(tmp_path / "a.gguf", SMALL | values)])
    generation = build_generation_config(model)
    assert generation == {
        "eos_token_id": [2, 5, 6, 7],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(build_config(model)))
    assert read_config(tmp_path).eos_ids == (2, 5, 6, 7)
