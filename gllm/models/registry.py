"""Which class computes which architecture.

Owns the table. Values are "module:Class", imported when first asked for: a new family is one file
and one line here.
"""

import importlib
from typing import TYPE_CHECKING

from gllm.models.errors import ModelError

if TYPE_CHECKING:
    from gllm.models.layers import DenseStage

ARCHITECTURES = {
    "LlamaForCausalLM": "gllm.models.llama:Llama",
    "Qwen2ForCausalLM": "gllm.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "gllm.models.qwen3:Qwen3",
}


def model_class(architecture: str) -> "type[DenseStage]":
    """The class for a name from config.json's `architectures`. Raises ModelError."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"architecture {architecture!r} is not supported; these are: {supported}")
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(module), name)
