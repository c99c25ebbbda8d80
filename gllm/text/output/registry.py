"""Registry of tool call formats and reasoning tags, and their detection.

A family is a file in `families/` with a `FORMAT`, `REASONING` tags or both; its name stands in
`gllm.config.output_parsers`.
"""

import importlib
from functools import lru_cache
from typing import Any

from gllm.config.output_parsers import REASONING_TAG_NAMES, TOOL_CALL_FORMAT_NAMES
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallFormat


def _family(name: str) -> Any:
    """Return the module of a family."""
    return importlib.import_module(f"gllm.text.output.families.{name}")


TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    name: _family(name).FORMAT for name in TOOL_CALL_FORMAT_NAMES
}
"""Formats by name, in the order in which `auto` looks for them."""
REASONING_TAGS: dict[str, ReasoningTags] = {
    name: _family(name).REASONING for name in REASONING_TAG_NAMES
}
"""Reasoning tags by name, in the order in which `auto` looks for them."""


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
