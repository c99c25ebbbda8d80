"""Language models of multimodal classes: equal to transformers' whole class given text only."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_local_model
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.options.field_types import FieldError
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import (
    DELTA_NET,
    EXPERTS,
    FAMILIES,
    SMALL,
    randomize,
    reference,
    save,
    use_recurrent_rule,
)

PROMPT = [3, 77, 21, 5, 9, 40, 41, 42, 118, 6, 3, 99, 17]
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1000.0}
TOWER = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP, PIXTRAL, CLIP, INTERNVL = (
    {"model_type": kind, **TOWER}
    for kind in ("siglip_vision_model", "pixtral", "clip_vision_model", "internvl_vision")
)
WHISPER = {
    "num_mel_bins": 8,
    "d_model": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_source_positions": 20,
}
TOP: dict[str, Any] = {"tie_word_embeddings": False}
CLASSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"head_dim": 10, "sliding_window": 9, "model_type": "gemma3_text"},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    "gemma4": (
        "Gemma4",
        FAMILIES["gemma4-e"].options | {"model_type": "gemma4_text"},
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
            },
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
    "glm4v": (
        "Glm4v",
        {
            "rope_parameters": MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        },
        {"vision_config": TOWER | {"model_type": "glm4v_vision"}},
    ),
    "internvl": ("InternVL", {"model_type": "qwen3", "head_dim": 8}, {"vision_config": INTERNVL}),
    "llava": ("Llava", {"model_type": "llama"}, {"vision_config": CLIP}),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {"vision_config": PIXTRAL},
    ),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": MROPE}, {"vision_config": TOWER}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, {"vision_config": TOWER}),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        {"vision_config": TOWER},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        EXPERTS | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        {"vision_config": TOWER},
    ),
    "qwen3.5": (
        "Qwen3_5",
        DELTA_NET,
        {"vision_config": {key: TOWER[key] for key in TOWER if key != "deepstack_visual_indexes"}},
    ),
    "deepseek-vl": ("DeepseekVL", {"model_type": "llama"}, {"vision_config": SIGLIP}),
    "ovis2": (
        "Ovis2",
        {"model_type": "qwen2"},
        {
            "vision_config": TOWER | {"num_visual_indicator_tokens": 5},
            "vocab_size": 131,
            "hidden_size": 48,
        },
    ),
    "qwen2-audio": ("Qwen2Audio", {"model_type": "qwen2"}, {"audio_config": WHISPER}),
    "voxtral": ("Voxtral", {"model_type": "llama"}, {"audio_config": WHISPER}),
    "smolvlm": (
        "SmolVLM",
        {"model_type": "llama"},
        {"vision_config": TOWER | {"model_type": "smolvlm_vision"}, "scale_factor": 1},
    ),
}
"""Class in transformers, keys of the language model, further keys of the class."""
QUICK = ("gemma3", "mistral3", "qwen3-vl-moe")
"""Classes whose layouts and language models differ most."""


@cache
def whole(name: str) -> Any:
    """The class in transformers with random weights, float32, evaluating."""
    import transformers

    stem, text, top = CLASSES[name]
    config = getattr(transformers, f"{stem}Config")(text_config=SMALL | text, **TOP | top)
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    use_recurrent_rule(model)
    return randomize(model)


@cache
def expected_logits(name: str) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = whole(name)(torch.tensor([PROMPT])).logits[0]
    return logits


def logits_of(folder: Path, stages: int = 2) -> torch.Tensor:
    """The logits of the prompt's last token, in two chunks."""
    pipeline = Pipeline(folder, stages)
    pipeline.add(1, PROMPT)
    pipeline.logits(pipeline.plan([pipeline.row(1, 9, samples=False)]))
    return pipeline.logits(pipeline.plan([pipeline.row(1, len(PROMPT) - 9)]))[1]


def check_equal(name: str, folder: Path) -> None:
    torch.testing.assert_close(logits_of(folder), expected_logits(name)[-1:], atol=2e-4, rtol=1e-4)


def saved(name: str, folder: Path) -> Path:
    whole(name).save_pretrained(folder)
    return folder


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("name", full_but(QUICK, CLASSES))
def test_equals_the_class_in_transformers(name: str, tmp_path: Path) -> None:
    check_equal(name, saved(name, tmp_path))


def to_new_layout(name: str) -> str:
    """The name in a module tree as transformers has it, whatever is written to files."""
    name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    name = re.sub(r"^language_model\.model\.|^model\.(?=layers|embed_tokens|norm)", "L.", name)
    name = re.sub(r"^(visual|vision_tower|multi_modal_projector)\.", r"model.\1.", name)
    return re.sub(r"^L\.", "model.language_model.", name)


def to_old_layout(name: str) -> str:
    name = re.sub(r"^lm_head\.", "language_model.lm_head.", to_new_layout(name))
    name = name.replace("model.language_model.", "language_model.model.")
    return re.sub(r"^model\.(visual|vision_tower|multi_modal_projector)\.", r"\1.", name)


def to_base_layout(name: str) -> str:
    return to_new_layout(name).removeprefix("model.")


@pytest.mark.parametrize("layout", [to_new_layout, to_old_layout])
@pytest.mark.parametrize("name", full_but(["gemma3"], ["gemma3", "llava", "qwen3-vl"]))
def test_both_layouts_of_tensor_names(
    name: str, layout: Callable[[str], str], tmp_path: Path
) -> None:
    rename(saved(name, tmp_path), layout)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(
        name.startswith(("model.language_model.", "language_model.model.")) for name in names
    )
    check_equal(name, tmp_path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_class_without_its_head(tmp_path: Path) -> None:
    """As Qwen3-VL-Embedding: tensor names without the class's prefix."""
    rename(saved("gemma3", tmp_path), to_base_layout)
    change_config(tmp_path, architectures=["Gemma3Model"])
    check_equal("gemma3", tmp_path)


def test_a_flat_configuration(tmp_path: Path) -> None:
    """As Qwen2-VL's first files: the language model's keys beside the others."""
    saved("qwen2-vl", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = raw | text | {"rope_theta": rope.pop("rope_theta"), "model_type": "qwen2_vl"}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    check_equal("qwen2-vl", tmp_path)


def test_experts_of_transposed_stacks(tmp_path: Path) -> None:
    """As Qwen3-VL's published files: [experts, inputs, outputs]."""
    saved("qwen3-vl-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacks = [name for name in tensors if "experts" in name]
    size, hidden = EXPERTS["moe_intermediate_size"], SMALL["hidden_size"]
    state = whole("qwen3-vl-moe").state_dict()
    for name in stacks:
        del tensors[name]
    for name, tensor in state.items():
        if "experts" in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    gate_up = next(tensor for name, tensor in tensors.items() if "gate_up_proj" in name)
    assert gate_up.shape == (EXPERTS["num_experts"], hidden, 2 * size)
    save_file(tensors, path)
    check_equal("qwen3-vl-moe", tmp_path)


def test_a_class_is_refused_with_its_images(tmp_path: Path) -> None:
    folder = saved("mistral3", tmp_path)
    plan_local_model(EngineConfig(model=str(folder)), folder)
    with pytest.raises(FieldError, match="of Mistral3ForConditionalGeneration only the language"):
        plan_local_model(EngineConfig(model=str(folder), language_model_only=False), folder)


def test_what_a_class_says_of_itself(tmp_path: Path) -> None:
    config = read_config(saved("mistral3", tmp_path))
    assert config.architecture == "Mistral3ForConditionalGeneration"
    assert config.model.notes == (
        "Mistral3ForConditionalGeneration: only its language model is loaded",
    )
    changes = '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'
    rope = read_config(tmp_path, changes).model.layers[0].attention.rope
    assert rope is not None
    assert rope.kind == "linear"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": {"model_type": "mistral", "brand_new": 1}}, "'brand_new'"),
        ({"text_config": {"model_type": "rwkv"}}, "model_type 'rwkv'"),
        ({"architectures": ["AriaForConditionalGeneration"]}, "language model AriaTextForCausalLM"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    if "text_config" in changes:
        changes = {"text_config": text | changes["text_config"]}
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=named):
        read_config(tmp_path)


def test_tensors_of_an_unknown_tower_are_refused(tmp_path: Path) -> None:
    rename(saved("mistral3", tmp_path), lambda name: name.replace("vision_tower", "smell_tower"))
    with pytest.raises(ModelError, match="smell_tower"):
        Pipeline(tmp_path)


def test_a_class_of_the_model_without_its_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B: no head, no prefix, and config.json does not tie them."""
    folder = save("qwen3", tmp_path / "whole")
    reference("qwen3").base_model.save_pretrained(tmp_path / "base")
    assert read_config(tmp_path / "base").architecture == "Qwen3ForCausalLM"
    table = reference("qwen3").model.embed_tokens.weight
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": table.detach().clone()}, folder / "model.safetensors")
    assert torch.equal(logits_of(tmp_path / "base"), logits_of(folder))
