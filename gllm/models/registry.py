"""Registry of architectures: names of config.json to the functions that build their specs.

A new family is one file in families/, or a function of a related family's file, and one line of
ARCHITECTURES.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.multimodal import LANGUAGE_MODELS
from gllm.models.spec.model import ModelSpec

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "AfmoeForCausalLM": "afmoe:build_spec",
        "ApertusForCausalLM": "apertus:build_spec",
        "ArceeForCausalLM": "nemotron:build_arcee_spec",
        "BaiChuanForCausalLM": "baichuan:build_spec",
        "BaichuanForCausalLM": "baichuan:build_spec",
        "BailingHybridForCausalLM": "bailing:build_hybrid_spec",
        "BambaForCausalLM": "bamba:build_spec",
        "BloomForCausalLM": "bloom:build_spec",
        "ChatGLMForCausalLM": "chatglm:build_spec",
        "ChatGLMForConditionalGeneration": "chatglm:build_spec",
        "ChatGLMModel": "chatglm:build_spec",
        "Cohere2ForCausalLM": "cohere:build_cohere2_spec",
        "Cohere2MoeForCausalLM": "cohere:build_cohere2_moe_spec",
        "CohereForCausalLM": "cohere:build_cohere_spec",
        "CwmForCausalLM": "llama:build_cwm_spec",
        "DeepseekForCausalLM": "deepseek:build_v1_spec",
        "DeepseekV2ForCausalLM": "deepseek:build_v2_spec",
        "DeepseekV32ForCausalLM": "deepseek:build_v32_spec",
        "DeepseekV3ForCausalLM": "deepseek:build_v3_spec",
        "Dots1ForCausalLM": "dots:build_dots1_spec",
        "Ernie4_5ForCausalLM": "ernie:build_ernie_spec",
        "Ernie4_5_MoeForCausalLM": "ernie:build_ernie_moe_spec",
        "Exaone4ForCausalLM": "exaone:build_exaone4_spec",
        "ExaoneMoeForCausalLM": "exaone:build_exaone_moe_spec",
        "FalconH1ForCausalLM": "falcon_h1:build_spec",
        "FalconForCausalLM": "falcon:build_spec",
        "FalconMambaForCausalLM": "mamba:build_falcon_mamba_spec",
        "FlexOlmoForCausalLM": "olmo:build_flex_olmo_spec",
        "FlintForCausalLM": "flint:build_spec",
        "GPT2LMHeadModel": "gpt2:build_spec",
        "GPTBigCodeForCausalLM": "gpt2:build_bigcode_spec",
        "GPTJForCausalLM": "gptj:build_spec",
        "GPTNeoForCausalLM": "gpt_neo:build_spec",
        "GPTNeoXForCausalLM": "gpt_neox:build_spec",
        "Gemma2ForCausalLM": "gemma:build_gemma2_spec",
        "Gemma3ForCausalLM": "gemma:build_gemma3_spec",
        "Gemma4ForCausalLM": "gemma4:build_spec",
        "Gemma4UnifiedForCausalLM": "gemma4:build_unified_spec",
        "GemmaForCausalLM": "gemma:build_gemma_spec",
        "Glm4ForCausalLM": "glm:build_glm4_spec",
        "Glm4MoeForCausalLM": "glm:build_glm4_moe_spec",
        "Glm4MoeLiteForCausalLM": "glm:build_glm4_moe_lite_spec",
        "GlmForCausalLM": "glm:build_glm_spec",
        "GlmMoeDsaForCausalLM": "glm:build_glm_dsa_spec",
        "GptOssForCausalLM": "gpt_oss:build_spec",
        "GraniteForCausalLM": "granite:build_granite_spec",
        "GraniteMoeForCausalLM": "granite:build_granite_moe_spec",
        "GraniteMoeHybridForCausalLM": "granite:build_granite_hybrid_spec",
        "GraniteMoeSharedForCausalLM": "granite:build_granite_moe_shared_spec",
        "GraniteMoeSWAForCausalLM": "granite:build_granite_moe_swa_spec",
        "GraniteSWAForCausalLM": "granite:build_granite_swa_spec",
        "HYV3ForCausalLM": "hunyuan:build_hy3_spec",
        "HeliumForCausalLM": "helium:build_spec",
        "HunYuanDenseV1ForCausalLM": "hunyuan:build_hunyuan_spec",
        "HunYuanMoEV1ForCausalLM": "hunyuan:build_hunyuan_moe_spec",
        "HyperCLOVAXForCausalLM": "granite:build_hyperclovax_spec",
        "InternLM2ForCausalLM": "internlm:build_internlm2_spec",
        "InternLM3ForCausalLM": "internlm:build_internlm3_spec",
        "Jais2ForCausalLM": "nemotron:build_jais2_spec",
        "JambaForCausalLM": "jamba:build_spec",
        "KimiLinearForCausalLM": "kimi_linear:build_spec",
        "Kolibri1ForCausalLM": "kolibri:build_spec",
        "LagunaForCausalLM": "laguna:build_spec",
        "Lfm2ForCausalLM": "lfm2:build_lfm2_spec",
        "Lfm2MoeForCausalLM": "lfm2:build_lfm2_moe_spec",
        "Lfm3ForCausalLM": "lfm2:build_lfm3_spec",
        "Llama4ForCausalLM": "llama4:build_spec",
        "LlamaForCausalLM": "llama:build_spec",
        "Mamba2ForCausalLM": "mamba:build_mamba2_spec",
        "MambaForCausalLM": "mamba:build_mamba_spec",
        "MellumForCausalLM": "qwen2:build_mellum_spec",
        "MiMoForCausalLM": "qwen2:build_mimo_spec",
        "MiMoV2FlashForCausalLM": "mimo:build_v2_flash_spec",
        "MiniCPM3ForCausalLM": "granite:build_minicpm3_spec",
        "MiniCPMForCausalLM": "granite:build_minicpm_spec",
        "MiniMaxForCausalLM": "minimax:build_text01_spec",
        "MiniMaxM1ForCausalLM": "minimax:build_text01_spec",
        "MiniMaxM2ForCausalLM": "minimax:build_m2_spec",
        "MPTForCausalLM": "mpt:build_spec",
        "MinistralForCausalLM": "mistral:build_ministral_spec",
        "MiniMaxText01ForCausalLM": "minimax:build_text01_spec",
        "Ministral3ForCausalLM": "mistral:build_ministral3_spec",
        "Mistral4ForCausalLM": "mistral:build_mistral4_spec",
        "MistralForCausalLM": "mistral:build_mistral_spec",
        "MixtralForCausalLM": "mistral:build_mixtral_spec",
        "MptForCausalLM": "mpt:build_spec",
        "NanoChatForCausalLM": "nanochat:build_spec",
        "NemotronForCausalLM": "nemotron:build_nemotron_spec",
        "NemotronHForCausalLM": "nemotron_h:build_spec",
        "OPTForCausalLM": "opt:build_spec",
        "Olmo2ForCausalLM": "olmo:build_olmo2_spec",
        "Olmo3ForCausalLM": "olmo:build_olmo3_spec",
        "OlmoForCausalLM": "olmo:build_olmo_spec",
        "OlmoeForCausalLM": "olmo:build_olmoe_spec",
        "Phi3ForCausalLM": "phi3:build_spec",
        "PhiForCausalLM": "phi:build_spec",
        "PhiMoEForCausalLM": "phi3:build_phi_moe_spec",
        "PhimoeForCausalLM": "phi3:build_phi_moe_spec",
        "QWenLMHeadModel": "qwen:build_spec",
        "Qwen2ForCausalLM": "qwen2:build_qwen2_spec",
        "Qwen2MoeForCausalLM": "qwen2:build_qwen2_moe_spec",
        "Qwen3ForCausalLM": "qwen2:build_qwen3_spec",
        "Qwen3MoeForCausalLM": "qwen2:build_qwen3_moe_spec",
        "Qwen3NextForCausalLM": "qwen3_next:build_qwen3_next_spec",
        "Qwen3_5ForCausalLM": "qwen3_next:build_qwen3_5_spec",
        "Qwen3_5MoeForCausalLM": "qwen3_next:build_qwen3_5_moe_spec",
        "SeedOssForCausalLM": "seed_oss:build_spec",
        "SmolLM3ForCausalLM": "smollm:build_spec",
        "SolarOpenForCausalLM": "glm:build_solar_open_spec",
        "StableLmForCausalLM": "stablelm:build_spec",
        "Starcoder2ForCausalLM": "starcoder:build_spec",
        "VaultGemmaForCausalLM": "gemma:build_vault_gemma_spec",
        "YoutuForCausalLM": "deepseek:build_youtu_spec",
    }
)
"""Architectures to "module:function" in families/, imported on first use."""


def spec_builder(architecture: str) -> Callable[[ConfigReader], ModelSpec]:
    """Return the function that builds the ModelSpec of an architecture from config.json.

    architecture: a key of ARCHITECTURES.
    """
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(f"gllm.models.families.{module}"), name)


def select_architecture(names: object) -> str:
    """Return the first supported name in config.json's `architectures`.

    The result is a key of ARCHITECTURES or of LANGUAGE_MODELS. Models that were saved without
    their LM head have a class of their own, such as Qwen3Model for Qwen3ForCausalLM.

    Raises ModelError.
    """
    candidates = names if isinstance(names, list) else []
    for name in candidates:
        for known in _equivalent_names(name) if isinstance(name, str) else ():
            if known in ARCHITECTURES or LANGUAGE_MODELS.get(known) in ARCHITECTURES:
                return known
    texts = [name for name in candidates if isinstance(name, str)]
    missing = [LANGUAGE_MODELS[name] for name in texts if name in LANGUAGE_MODELS]
    reason = f": its language model {missing[0]}" if missing else ""
    raise ModelError(
        f"config.json: architectures {names!s:.200}{reason} is not supported; "
        f"these are: {', '.join([*ARCHITECTURES, *multimodal_classes()])}"
    )


def multimodal_classes() -> list[str]:
    """Return the multimodal classes whose language model is supported."""
    return [name for name, text in LANGUAGE_MODELS.items() if text in ARCHITECTURES]


def _equivalent_names(name: str) -> tuple[str, ...]:
    """Return a name in `architectures`, and those of the same model with an LM head."""
    if not name.endswith("Model"):
        return (name,)
    stem = name.removesuffix("Model")
    text_stem = stem.removesuffix("Text")
    return name, f"{stem}ForConditionalGeneration", f"{text_stem}ForCausalLM"
