"""Registry of tool call formats and reasoning tags, and their detection.

A new format is a file in `families/` and a line here.
"""

from functools import lru_cache

from gllm.text.output.families import (
    apertus,
    cohere,
    deepseek,
    deepseek_v32,
    gemma4,
    glm4,
    glm45,
    granite,
    harmony,
    hermes,
    hunyuan_a13b,
    hy_v3,
    kimi_k2,
    lfm2,
    llama3,
    minimax_m2,
    mistral,
    nemotron,
    qwen3_coder,
    seed_oss,
)
from gllm.text.output.reasoning import REASONING_TAGS, ReasoningTags
from gllm.text.output.tool_calls import ToolCallFormat

TOOL_CALL_FORMATS = {
    "harmony": harmony.FORMAT,
    "deepseek": deepseek.FORMAT,
    "deepseek_v32": deepseek_v32.FORMAT,
    "kimi_k2": kimi_k2.FORMAT,
    "minimax_m2": minimax_m2.FORMAT,
    "gemma4": gemma4.FORMAT,
    "lfm2": lfm2.FORMAT,
    "apertus": apertus.FORMAT,
    "cohere": cohere.FORMAT,
    "nemotron": nemotron.FORMAT,
    "hy_v3": hy_v3.FORMAT,
    "hunyuan_a13b": hunyuan_a13b.FORMAT,
    "granite": granite.FORMAT,
    "mistral": mistral.FORMAT,
    "seed_oss": seed_oss.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "glm45": glm45.FORMAT,
    "hermes": hermes.FORMAT,
    "llama3": llama3.FORMAT,
    "glm4": glm4.FORMAT,
}
"""Formats by name, in the order in which `auto` looks for them: several contain <tool_call>."""


def select_tool_call_format(
    parser: str, template: str, model_type: str = ""
) -> ToolCallFormat | None:
    """Return the tool call format of a model; None for `none` and for unknown models.

    Args:
        parser: Value of --tool-call-parser. `auto` selects the format that the template uses, or
            else the format of the model type.
        template: Source of the chat template.
        model_type: `model_type` of config.json.
    """
    if parser != "auto":
        return TOOL_CALL_FORMATS.get(parser)
    # Texts of Jinja may have escaped quotes.
    template = template.replace('\\"', '"')
    formats = TOOL_CALL_FORMATS.values()
    by_template = (format_ for format_ in formats if format_.is_used_by(template))
    by_model_type = (format_ for format_ in formats if model_type in format_.model_types)
    return next(by_template, None) or next(by_model_type, None)


def find_channel_format(tags: ReasoningTags | None) -> ToolCallFormat | None:
    """Return the format whose parser finds the reasoning between these tags; None for others."""
    call_format = None if tags is None else TOOL_CALL_FORMATS.get(tags.name)
    return call_format if call_format is not None and call_format.has_channels else None


@lru_cache(maxsize=16)
def select_reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """Return the reasoning tags of a model; None for `none` and for models without reasoning.

    Args:
        parser: Value of --reasoning-parser. `auto` selects the tags that the template contains.
        template: Source of the chat template.
    """
    if parser != "auto":
        return REASONING_TAGS.get(parser)
    return next((tags for tags in REASONING_TAGS.values() if tags.are_used_by(template)), None)
