"""Registry of architectures: names of config.json to the functions that build their specs.

A new family is one file in families/, or a function of a related family's file, and one line of
ARCHITECTURES.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec import ModelSpec

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "BaiChuanForCausalLM": "baichuan:build_spec",
        "BaichuanForCausalLM": "baichuan:build_spec",
        "BloomForCausalLM": "bloom:build_spec",
        "ChatGLMForCausalLM": "chatglm:build_spec",
        "ChatGLMForConditionalGeneration": "chatglm:build_spec",
        "ChatGLMModel": "chatglm:build_spec",
        "Cohere2ForCausalLM": "cohere:build_cohere2_spec",
        "CohereForCausalLM": "cohere:build_cohere_spec",
        "DeepseekForCausalLM": "deepseek:build_v1_spec",
        "DeepseekV2ForCausalLM": "deepseek:build_v2_spec",
        "DeepseekV3ForCausalLM": "deepseek:build_v3_spec",
        "FalconForCausalLM": "falcon:build_spec",
        "GPT2LMHeadModel": "gpt2:build_spec",
        "Gemma2ForCausalLM": "gemma:build_gemma2_spec",
        "Gemma3ForCausalLM": "gemma:build_gemma3_spec",
        "GemmaForCausalLM": "gemma:build_gemma_spec",
        "Glm4ForCausalLM": "glm:build_glm4_spec",
        "GlmForCausalLM": "glm:build_glm_spec",
        "LlamaForCausalLM": "llama:build_spec",
        "MistralForCausalLM": "mistral:build_mistral_spec",
        "MixtralForCausalLM": "mistral:build_mixtral_spec",
        "OPTForCausalLM": "opt:build_spec",
        "Phi3ForCausalLM": "phi3:build_spec",
        "QWenLMHeadModel": "qwen:build_spec",
        "Qwen2ForCausalLM": "qwen2:build_qwen2_spec",
        "Qwen2MoeForCausalLM": "qwen2:build_qwen2_moe_spec",
        "Qwen3ForCausalLM": "qwen2:build_qwen3_spec",
        "Qwen3MoeForCausalLM": "qwen2:build_qwen3_moe_spec",
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
    """Return the first supported name in config.json's `architectures`. Raises ModelError."""
    candidates = names if isinstance(names, list) else []
    known = [name for name in candidates if isinstance(name, str) and name in ARCHITECTURES]
    if not known:
        raise ModelError(
            f"config.json: architectures {names!s:.200} is not supported; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    return str(known[0])
