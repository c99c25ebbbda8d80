"""Which family describes which architecture.

Owns the table. Values are "module:function", imported when first asked for: a new family is one
file and one line here.
"""

import importlib
from collections.abc import Callable

from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import Model

ARCHITECTURES = {
    "BaiChuanForCausalLM": "baichuan:describe",
    "BaichuanForCausalLM": "baichuan:describe",
    "BloomForCausalLM": "bloom:describe",
    "ChatGLMForConditionalGeneration": "chatglm:describe",
    "ChatGLMModel": "chatglm:describe",
    "Cohere2ForCausalLM": "cohere:cohere2",
    "CohereForCausalLM": "cohere:cohere",
    "DeepseekV2ForCausalLM": "deepseek:v2",
    "DeepseekV3ForCausalLM": "deepseek:v3",
    "FalconForCausalLM": "falcon:describe",
    "GPT2LMHeadModel": "gpt2:describe",
    "Gemma2ForCausalLM": "gemma:gemma2",
    "Gemma3ForCausalLM": "gemma:gemma3",
    "Glm4ForCausalLM": "glm:glm4",
    "GlmForCausalLM": "glm:glm",
    "LlamaForCausalLM": "llama:describe",
    "MistralForCausalLM": "mistral:describe",
    "MixtralForCausalLM": "mixtral:describe",
    "OPTForCausalLM": "opt:describe",
    "Phi3ForCausalLM": "phi3:describe",
    "Qwen2ForCausalLM": "qwen2:describe",
    "Qwen2MoeForCausalLM": "qwen2_moe:describe",
    "Qwen3ForCausalLM": "qwen3:describe",
    "Qwen3MoeForCausalLM": "qwen3_moe:describe",
}


def family(architecture: str) -> Callable[[Keys], Model]:
    """What describes an architecture, one of ARCHITECTURES."""
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(f"gllm.models.families.{module}"), name)


def architecture_of(names: object) -> str:
    """The first name of config.json's `architectures` that is known. Raises ModelError."""
    given = names if isinstance(names, list) else []
    known = [name for name in given if isinstance(name, str) and name in ARCHITECTURES]
    if not known:
        raise ModelError(
            f"config.json: architectures {names!s:.200} is not supported; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    return str(known[0])
