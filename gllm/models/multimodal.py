"""The language models of multimodal classes: their configuration and the names of their tensors.

A multimodal class is one line of LANGUAGE_MODELS. Its config.json has the language model's keys
in a nested object, or beside those on images, and its tensors have the language model's names
behind a prefix. Positions of text have the same index in each section of a multimodal rope, which
is therefore the ordinary one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gllm.models.config_overrides import apply_overrides
from gllm.models.errors import ModelError

LANGUAGE_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "AriaForConditionalGeneration": "AriaTextForCausalLM",
        "AudioFlamingo3ForConditionalGeneration": "Qwen2ForCausalLM",
        "AyaVisionForConditionalGeneration": "Cohere2ForCausalLM",
        "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
        "Cosmos3OmniForConditionalGeneration": "Qwen3ForCausalLM",
        "DeepseekVLForConditionalGeneration": "LlamaForCausalLM",
        "DeepseekVLHybridForConditionalGeneration": "LlamaForCausalLM",
        "Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_VLMoeTextForCausalLM",
        "Exaone4_5_ForConditionalGeneration": "Exaone4ForCausalLM",
        "FastVlmForConditionalGeneration": "Qwen2ForCausalLM",
        "FunAsrNanoForConditionalGeneration": "Qwen3ForCausalLM",
        "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
        "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
        "Glm46VForConditionalGeneration": "Glm4ForCausalLM",
        "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
        "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
        "GlmAsrForConditionalGeneration": "LlamaForCausalLM",
        "GlmOcrForConditionalGeneration": "Glm4ForCausalLM",
        "GotOcr2ForConditionalGeneration": "Qwen2ForCausalLM",
        "Granite4VisionForConditionalGeneration": "GraniteForCausalLM",
        "GraniteSpeechForConditionalGeneration": "GraniteForCausalLM",
        "GraniteSpeechPlusForConditionalGeneration": "GraniteForCausalLM",
        "HunYuanVLForConditionalGeneration": "HunYuanDenseV1ForCausalLM",
        "HyperCLOVAXVisionV2ForConditionalGeneration": "HyperCLOVAXForCausalLM",
        "Idefics2ForConditionalGeneration": "MistralForCausalLM",
        "Idefics3ForConditionalGeneration": "LlamaForCausalLM",
        "InternVLChatModel": "Qwen2ForCausalLM",
        "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
        "JanusForConditionalGeneration": "LlamaForCausalLM",
        "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
        "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
        "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
        "Lfm2VlForConditionalGeneration": "Lfm2ForCausalLM",
        "LightOnOcrForConditionalGeneration": "Qwen3ForCausalLM",
        "Lfm3VlForConditionalGeneration": "Lfm3ForCausalLM",
        "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
        "LlavaForConditionalGeneration": "LlamaForCausalLM",
        "LlavaNextForConditionalGeneration": "LlamaForCausalLM",
        "LlavaNextVideoForConditionalGeneration": "LlamaForCausalLM",
        "LlavaOnevisionForConditionalGeneration": "Qwen2ForCausalLM",
        "MiniCPMOcrForConditionalGeneration": "Qwen3_5ForCausalLM",
        "MiniCPMV4_6ForConditionalGeneration": "Qwen3_5ForCausalLM",
        "MiniCPMV4_7ForConditionalGeneration": "Qwen3_5ForCausalLM",
        "Mistral3ForConditionalGeneration": "MistralForCausalLM",
        "MusicFlamingoForConditionalGeneration": "Qwen2ForCausalLM",
        "Ovis2ForConditionalGeneration": "Qwen2ForCausalLM",
        "PerceptionLMForConditionalGeneration": "LlamaForCausalLM",
        "Phi4MMForCausalLM": "Phi3ForCausalLM",
        "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
        "QianfanOCRForConditionalGeneration": "Qwen3ForCausalLM",
        "Qwen2AudioForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen3ASRForConditionalGeneration": "Qwen3ForCausalLM",
        "Qwen3OmniMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
        "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
        "SmolVLMForConditionalGeneration": "LlamaForCausalLM",
        "VibeVoiceAsrForConditionalGeneration": "Qwen2ForCausalLM",
        "VideoLlama3ForConditionalGeneration": "Qwen2ForCausalLM",
        "VideoLlavaForConditionalGeneration": "LlamaForCausalLM",
        "VipLlavaForConditionalGeneration": "LlamaForCausalLM",
        "VoxtralForConditionalGeneration": "LlamaForCausalLM",
    }
)
"""Multimodal classes to the architecture of their language model, if its configuration has no type
or one of the class itself, such as qwen3_vl_text."""
LANGUAGE_MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "glm4v_moe_text": "Glm4MoeForCausalLM",
        "glm4v_text": "Glm4ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "granite": "GraniteForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "hyperclovax": "HyperCLOVAXForCausalLM",
        "internlm2": "InternLM2ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "lfm3": "Lfm3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "phi": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
        "qwen3_vl_text": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
)
"""Other types of a nested configuration (`model_type`) to architectures."""
_LLAMA_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN2_VL = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma3": {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        "glm4v": {"attention_bias": True, "head_dim": None, "rms_norm_eps": 1e-5},
        "glm_ocr": {"attention_bias": False, "head_dim": None, "rms_norm_eps": 1e-5},
        "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, **_LLAMA_SIZES},
        "mistral": {"intermediate_size": 14336, **_LLAMA_SIZES},
        "qwen2": {"intermediate_size": 22016, "num_key_value_heads": 32, **_LLAMA_SIZES},
        "qwen2_5_omni": _QWEN2_VL,
        "qwen2_5_vl": _QWEN2_VL,
        "qwen2_vl": _QWEN2_VL,
        "qwen3_omni_moe": {"rope_theta": 1e6, "norm_topk_prob": True},
        "qwen3_vl": {"rope_theta": 5e5},
        "qwen3_vl_moe": {"rope_theta": 5e5, "norm_topk_prob": True},
    }
)
"""Values of absent keys by the type of the language model, without `_text`: its files have only the
keys that differ. Others are as in the family."""
NESTED_KEYS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys of nested configurations that contain the language model's, outermost first."""
CLASS_KEYS = (
    *("architectures", "model_type", "tie_word_embeddings", "quantization_config"),
    *("dtype", "torch_dtype", "vocab_size"),
)
"""Keys beside a nested configuration that apply to the language model unless it has its own; the
others are on images, video and audio."""
MEDIA_KEYS = re.compile(
    r"(.*_)?(image|img|vision|video|audio|speech|visual|spatial|media|pixel|perceiver|resampler"
    r"|embd_layer|bo[aiv]|eo[aiv])s?(_.*)?"
)
"""Keys on images, video and audio in the language model's configuration."""
MEDIA_TENSORS = (
    r"(thinker\.)?(model\.)?(visual|vision_|vit|image_|video_|audio_|embed_vision|embed_audio|mm_|"
    r"mlp1|multi_modal_|multimodal_|connector|high_res_vision|aligner|vqmodel|generation_|talker|"
    r"code2wav|token2wav|encoder\.|projector\.|merger\.|acoustic_|semantic_|layerwise_|spatial_|"
    r"embed_tokens_extend).*",
    r".*\.lora_[AB]\..*",
)
"""Patterns of the tensors of towers and projectors, and of their LoRA, which are not read."""
PREFIXES = (
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.text_model.", "thinker.model."),
)
"""Prefixes of the language model's tensors without its head; the first that a name has applies."""
HEAD_PREFIXES = ("thinker.", "language_model.")
"""Prefixes that the tensor of the LM head may have."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Configuration of a language model, from the config.json of its class or a multimodal one."""

    architecture: str
    """Name of its architecture, which is not necessarily supported."""
    content: dict[str, Any]
    """The configuration as a config.json of that architecture has it."""
    multimodal_class: str | None = None
    """Class whose language model it is; None if config.json has the language model's class."""
    section: str = ""
    """Key of the nested configuration that it is from; empty for none."""


def read_language_model(
    raw: dict[str, Any], multimodal_class: str, overrides: Mapping[str, Any]
) -> LanguageModelConfig:
    """Return the configuration of a multimodal class's language model.

    Args:
        raw: content of config.json.
        multimodal_class: a key of LANGUAGE_MODELS.
        overrides: values that replace keys of the result.

    Raises:
        ModelError: the type of the language model is unknown.
    """
    content, section = raw, ""
    for key in NESTED_KEYS:
        nested = content.get(key)
        if nested is not None:
            if not isinstance(nested, dict):
                raise ModelError(f"config.json: {key} is {nested!r:.80}, but has to be an object")
            outer = {name: content[name] for name in CLASS_KEYS if content.get(name) is not None}
            content, section = outer | nested, key
            # Classes tie their own head, whatever the nested configuration says.
            if "tie_word_embeddings" in outer:
                content["tie_word_embeddings"] = outer["tie_word_embeddings"]
    own_type, kind = str(raw.get("model_type")), str(content.get("model_type") or "")
    is_own = not kind or not section or kind.startswith(own_type)
    if not is_own and kind not in LANGUAGE_MODEL_TYPES:
        raise ModelError(
            f"config.json: the language model of {multimodal_class} has the model_type {kind!r:.80}"
            f", which is not supported; these are: {', '.join(LANGUAGE_MODEL_TYPES)}"
        )
    content = {**DEFAULTS.get(kind.removesuffix("_text"), {}), **content}
    content = {key: value for key, value in content.items() if not MEDIA_KEYS.fullmatch(key)}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(content.get(key), dict):
            content[key] = _text_rope(content[key])
    architecture = LANGUAGE_MODEL_TYPES.get(kind, LANGUAGE_MODELS[multimodal_class])
    flat = {key: value for key, value in overrides.items() if key not in NESTED_KEYS}
    content = apply_overrides(content, flat)
    return LanguageModelConfig(architecture, content, multimodal_class, section)


def _text_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rotary embedding without the sections of a multimodal one."""
    kept = {
        key: _text_rope(value) if isinstance(value, dict) else value
        for key, value in rope.items()
        if key not in ("mrope_section", "mrope_interleaved", "interleaved", "xdrope_section")
    }
    return kept | {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}


def rename_tensor(name: str, root: str, head: str) -> str:
    """Return the name by which a language model reads a tensor of a multimodal class.

    Args:
        name: name in the checkpoint.
        root: prefix of the language model's tensors, such as `model.`.
        head: name of its LM head, without `.weight`.
    """
    # Weights beside those of LoRA.
    name = name.replace(".base_layer.", ".")
    for prefix in HEAD_PREFIXES:
        if name.startswith(f"{prefix}{head}."):
            return name.removeprefix(prefix)
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return root + name.removeprefix(prefix)
    return name
