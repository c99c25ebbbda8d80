"""gllm: pipeline-parallel LLM serving with token throttling. Names are loaded on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gllm.config import EngineConfig, SamplingParams, StructuredOutput
    from gllm.engine import Engine
    from gllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "StructuredOutput"]

_HOMES = {
    "Engine": "gllm.engine",
    "LLM": "gllm.llm",
    "EngineConfig": "gllm.config",
    "SamplingParams": "gllm.config",
    "StructuredOutput": "gllm.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import gllm` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
