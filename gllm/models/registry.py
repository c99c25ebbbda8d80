"""Which family describes which architecture.

Owns the table. Values are "module:function", imported when first asked for: a new family is one
file and one line here.
"""

import importlib
from collections.abc import Callable

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec import ModelSpec

ARCHITECTURES = {
    "BaiChuanForCausalLM": "baichuan:build_spec",
    "BaichuanForCausalLM": "baichuan:build_spec",
    "BloomForCausalLM": "bloom:build_spec",
    "ChatGLMForConditionalGeneration": "chatglm:build_spec",
    "ChatGLMModel": "chatglm:build_spec",
    "Cohere2ForCausalLM": "cohere:build_cohere2_spec",
    "CohereForCausalLM": "cohere:build_cohere_spec",
    "DeepseekV2ForCausalLM": "deepseek:build_v2_spec",
    "DeepseekV3ForCausalLM": "deepseek:build_v3_spec",
    "FalconForCausalLM": "falcon:build_spec",
    "GPT2LMHeadModel": "gpt2:build_spec",
    "Gemma2ForCausalLM": "gemma:build_gemma2_spec",
    "Gemma3ForCausalLM": "gemma:build_gemma3_spec",
    "Glm4ForCausalLM": "glm:build_glm4_spec",
    "GlmForCausalLM": "glm:build_glm_spec",
    "LlamaForCausalLM": "llama:build_spec",
    "MistralForCausalLM": "mistral:build_spec",
    "MixtralForCausalLM": "mixtral:build_spec",
    "OPTForCausalLM": "opt:build_spec",
    "Phi3ForCausalLM": "phi3:build_spec",
    "Qwen2ForCausalLM": "qwen2:build_spec",
    "Qwen2MoeForCausalLM": "qwen2_moe:build_spec",
    "Qwen3ForCausalLM": "qwen3:build_spec",
    "Qwen3MoeForCausalLM": "qwen3_moe:build_spec",
}


def family(architecture: str) -> Callable[[ConfigReader], ModelSpec]:
    """What describes an architecture, one of ARCHITECTURES."""
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(f"gllm.models.families.{module}"), name)


def select_architecture(names: object) -> str:
    """The first name of config.json's `architectures` that is known. Raises ModelError."""
    given = names if isinstance(names, list) else []
    known = [name for name in given if isinstance(name, str) and name in ARCHITECTURES]
    if not known:
        raise ModelError(
            f"config.json: architectures {names!s:.200} is not supported; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    return str(known[0])
