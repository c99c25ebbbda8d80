"""gllm: pipeline-parallel LLM serving with token throttling. Names are loaded on first use."""

from typing import TYPE_CHECKING, Any

from gllm.options.version import __version__

if TYPE_CHECKING:
    from gllm.config.engine import EngineConfig
    from gllm.config.sampling import SamplingParams, StructuredOutput
    from gllm.engine.engine import Engine
    from gllm.engine.llm import LLM

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "StructuredOutput", "__version__"]

_MODULES = {
    "Engine": "gllm.engine.engine",
    "LLM": "gllm.engine.llm",
    "EngineConfig": "gllm.config.engine",
    "SamplingParams": "gllm.config.sampling",
    "StructuredOutput": "gllm.config.sampling",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import gllm` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
