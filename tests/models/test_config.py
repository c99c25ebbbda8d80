"""Configuration files: what is read, and what is refused by name."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.models.config import model_notes, read_config
from gllm.models.errors import ModelError
from gllm.models.hub import DEMO
from gllm.models.registry import ARCHITECTURES, spec_builder
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import RopeSpec
from tests.support.models.published import PUBLISHED, read
from tests.support.text.tokenizers import save as save_tokenizer
from tests.support.text.tokenizers import sentencepiece

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A model folder with these keys changed; None removes one."""
    keys = {key: value for key, value in (BASE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def parts(model: ModelSpec) -> tuple[AttentionSpec, MLPSpec]:
    """Of the first layer."""
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    return attention, mlp


def rope(folder: Path) -> RopeSpec | None:
    return parts(read_config(folder).model)[0].rope


def test_defaults_follow_the_format(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    attention, mlp = parts(config.model)
    assert (attention.num_kv_heads, attention.head_dim) == (8, 8)
    assert attention.rope == RopeSpec(8, "default", 10_000.0, {})
    assert (config.model.norm.eps, config.dtype) == (1e-6, "float32")
    assert not any(
        (
            attention.qkv_proj.has_bias,
            attention.out_proj.has_bias,
            mlp.up_proj.has_bias,
            mlp.down_proj.has_bias,
        )
    )
    assert config.model.head.name == "lm_head"
    assert config.model.context_length == 2048


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token_id": [7, 5]}, eos_token_id=[2, 5])
    assert read_config(folder).eos_ids == (2, 5, 7)
    folder = write(tmp_path, {}, eos_token_id=None)
    assert read_config(folder).eos_ids == ()


EOS = "</s>"
TOKENIZERS: dict[str, dict[str, Any]] = {
    "configuration": {
        "tokenizer_config.json": {
            "eos_token": {"content": EOS},
            "added_tokens_decoder": {"6": {"content": "<s>"}, "9": {"content": EOS}},
        },
        "special_tokens_map.json": {"eos_token": "<s>"},
    },
    "older file": {
        "tokenizer_config.json": {"eos_token": "<s>"},
        "special_tokens_map.json": {"eos_token": EOS},
        "added_tokens.json": {EOS: 9},
    },
    "added": {
        "tokenizer_config.json": {"eos_token": EOS},
        "tokenizer.json": {"added_tokens": [{"id": 9, "content": EOS}], "model": {}},
    },
    "vocabulary": {
        "tokenizer_config.json": {"eos_token": EOS},
        "tokenizer.json": {"added_tokens": [], "model": {"vocab": {EOS: 9}}},
    },
    "unigram": {
        "tokenizer_config.json": {"eos_token": EOS},
        "tokenizer.json": {"model": {"vocab": [["a", -1.0]] * 9 + [[EOS, 0.0]]}},
    },
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokenizer_s_eos_token_ends_texts_too(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token_id": 5})
    for name, content in TOKENIZERS[kind].items():
        (folder / name).write_text(json.dumps(content))
    assert read_config(folder).eos_ids == (2, 5, 9)


@pytest.mark.parametrize("place", ["added", "model"])
def test_half_a_surrogate_pair_in_a_vocabulary_hides_no_eos_token(
    place: str, tmp_path: Path
) -> None:
    """Which the standard library reads, and faster decoders do not."""
    texts = {"added": '[{"id": 3, "content": "\\ud800"}]', "model": "[]"}
    vocabulary = '{"\\ud800": 1, "</s>": 9}' if place == "model" else '{"</s>": 9}'
    folder = write(tmp_path, {"eos_token_id": 5})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    text = f'{{"added_tokens": {texts[place]}, "model": {{"vocab": {vocabulary}}}}}'
    (folder / "tokenizer.json").write_text(text)
    assert read_config(folder).eos_ids == (2, 5, 9)


def test_the_eos_token_is_that_of_transformers(tmp_path: Path) -> None:
    backend = sentencepiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token="<s>")
    tokenizer.save_pretrained(tmp_path)
    folder = write(tmp_path, eos_token_id=None)
    assert read_config(folder).eos_ids == (AutoTokenizer.from_pretrained(folder).eos_token_id,)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"eos_token": "?"}', b'{"eos_token": [1]}'])
def test_a_tokenizer_without_an_id_of_its_eos_token(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [3, {}], "model": {"vocab": 1}}')
    assert read_config(write(tmp_path, eos_token_id=None)).eos_ids == ()


def test_a_model_without_an_end_of_texts_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for eos_token_id in (1, None):
        folder = write(tmp_path, eos_token_id=eos_token_id)
        save_tokenizer(folder, sentencepiece())
        caplog.clear()
        Engine(EngineConfig(str(folder)))
        warned = "no end-of-sequence token" in caplog.text
        assert warned == (eos_token_id is None)


def test_attn_factor_of_yarn_is_read_and_logged(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has such a config.json."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512, "attn_factor": 0.878}
    folder = write(tmp_path, rope_scaling={"rope_type": "yarn", **scaling})
    assert rope(folder) == RopeSpec(8, "yarn", 10_000.0, scaling)
    (note,) = model_notes(read_config(folder).model, 100)
    assert "attn_factor 0.878" in note
    folder = write(tmp_path, rope_scaling={"rope_type": "yarn", **scaling, "attn_factor": -1.0})
    with pytest.raises(ModelError, match="attn_factor"):
        read_config(folder)


def test_private_texts_are_harmless(tmp_path: Path) -> None:
    read_config(write(tmp_path, _model_name_or_path="x", _anything="else"))
    for value in (1, True, ["x"], {"x": "y"}):
        with pytest.raises(ModelError, match=r"'_anything'.*unknown"):
            read_config(write(tmp_path, _anything=value))
    with pytest.raises(ModelError, match=r"'anything'.*unknown"):
        read_config(write(tmp_path, anything="else"))


def test_linear_scaling_extends_the_context(tmp_path: Path) -> None:
    """As in vLLM, by the factor."""
    scaling = {"rope_type": "linear", "factor": 2.5}
    folder = write(tmp_path, rope_scaling=scaling)
    assert read_config(folder).model.context_length == 5120
    # Gemma 3 states the extended context itself.
    gemma: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}
    folder = write(tmp_path, rope_scaling=scaling, sliding_window=64, **gemma)
    assert read_config(folder).model.context_length == 2048
    folder = write(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0**22})
    with pytest.raises(ModelError, match="factor makes a context"):
        read_config(folder)


def test_both_styles_of_rope_are_one(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512}
    wanted = RopeSpec(8, "yarn", 5000.0, scaling)
    old = write(tmp_path, rope_theta=5000.0, rope_scaling={"type": "yarn", **scaling})
    assert rope(old) == wanted
    new = write(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **scaling})
    assert rope(new) == wanted
    assert read_config(new).model.context_length == 2048
    scaling["factor"] = 8.0
    assert (
        read_config(write(tmp_path, rope_scaling={"type": "yarn", **scaling})).model.context_length
        == 4096
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["T5Model"]}, "T5Model"),
    ({"architectures": None}, "architectures"),
    ({"hidden_act": "selu"}, "hidden_act 'selu'"),
    ({"sliding_window": 512}, "sliding_window' .512"),
    ({"use_sliding_window": True}, "use_sliding_window True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type 'ntk'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "lacks.*factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "no number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"type": "su", "original_max_position_embeddings": 0}}, "lacks.*factor"),
    ({"rope_parameters": {"rope_type": "default", "twist": 2}}, "unknown.*twist"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"vocab_size": None}, "vocab_size is None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7 "),
    ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_what_it_does_not_compute(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        read_config(write(tmp_path, **changes))


def test_qwen_has_a_switch_for_its_window(tmp_path: Path) -> None:
    """Its files name a window that the switch leaves unused."""
    for switch in (None, False):
        window: dict[str, Any] = {
            "sliding_window": 4096,
            "max_window_layers": 2,
            "use_sliding_window": switch,
        }
        assert read_config(write(tmp_path, architectures=["Qwen2ForCausalLM"], **window))


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_broken_files_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)


def test_every_architecture_has_its_family() -> None:
    for name in ARCHITECTURES:
        assert callable(spec_builder(name))


def test_sampling_defaults_have_their_fields_types(tmp_path: Path) -> None:
    folder = write(tmp_path, {"top_k": 50.0, "temperature": 1, "top_p": None, "do_sample": True})
    defaults = read_config(folder).sampling
    assert repr(defaults) == "{'temperature': 1.0, 'top_k': 50}"
    assert SamplingParams(**defaults).top_k == 50
    assert read_config(write(tmp_path, {"eos_token_id": [7.0]})).eos_ids == (2, 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 50.5),
        ("top_k", -7),
        ("top_k", "50"),
        ("top_k", True),
        ("top_k", 1e300),
        ("temperature", 7.0),
        ("temperature", True),
        ("temperature", "0.7"),
        ("top_p", 0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("top_k", [50]),
        ("min_p", {}),
        ("eos_token_id", True),
        ("eos_token_id", 2**70),
        ("eos_token_id", 7.5),
        ("eos_token_id", [2, None]),
        ("eos_token_id", float("inf")),
    ],
    ids=str,
)
def test_defaults_that_no_request_could_have_are_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    """When the model is loaded, and not by the first request."""
    shown = re.escape(f"{value!r:.3}")
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key}.* is .*{shown}"):
        read_config(write(tmp_path, {key: value}))


@pytest.mark.parametrize(("longest", "kind"), [(4096, "short"), (4097, "long")])
def test_the_choice_of_longrope_factors_is_logged_once(longest: int, kind: str) -> None:
    (note,) = model_notes(read(PUBLISHED["phi-3-mini-128k"]), longest)
    assert f"the {kind} factors" in note
    assert str(longest) in note


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "mixtral-8x7b", "phi-3-mini-128k"])
def test_layer_types_that_transformers_ignores_are_logged_once(name: str) -> None:
    raw = PUBLISHED[name] | {"sliding_window": 4096, "rope_scaling": None}
    types = ["sliding_attention", "full_attention"] * (raw["num_hidden_layers"] // 2)
    (note,) = model_notes(read(raw | {"layer_types": types}), 4096)
    assert "16 of 32 layers have full attention" in note
    for same in (raw, raw | {"layer_types": ["sliding_attention"] * len(types)}):
        assert model_notes(read(same), 4096) == []


def test_notes_are_in_the_engine_s_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    types = ["full_attention"] + ["sliding_attention"] * 2
    folder = write(
        tmp_path, architectures=["MistralForCausalLM"], layer_types=types, num_key_value_heads=4
    )
    shutil.copy(DEMO / "tokenizer.json", folder)
    Engine(EngineConfig(str(folder)))
    assert [record.message for record in caplog.records if "layer_types" in record.message] == [
        "config.json: 1 of 3 layers have full attention, as layer_types says; "
        "transformers ignores layer_types in this architecture"
    ]
