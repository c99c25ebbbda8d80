"""The families by name, and which of them a model speaks.

Owns the two registries and the detection. A family is a file and a line here.
"""

from gllm.text.output.families import (
    deepseek,
    glm4,
    glm45,
    hermes,
    llama3,
    mistral,
    qwen3_coder,
)
from gllm.text.output.reasoning import REASONING_TAGS, ReasoningTags
from gllm.text.output.tool_calls import ToolCallFormat

# In the order in which they are looked for: several families write <tool_call>.
TOOL_CALL_FORMATS = {
    family.name: family
    for family in (
        deepseek.FAMILY,
        mistral.FAMILY,
        qwen3_coder.FAMILY,
        glm45.FAMILY,
        hermes.FAMILY,
        llama3.FAMILY,
        glm4.FAMILY,
    )
}


def select_tool_call_format(
    choice: str, template: str, model_type: str = ""
) -> ToolCallFormat | None:
    """The family that a setting names; for `auto` the one whose format the template's source shows,
    else the one of the model's type; None for `none` and where nothing is known."""
    if choice != "auto":
        return TOOL_CALL_FORMATS.get(choice)
    families = TOOL_CALL_FORMATS.values()
    shown = (family for family in families if family.written_by(template))
    typed = (family for family in families if model_type in family.model_types)
    return next(shown, None) or next(typed, None)


def select_reasoning_tags(choice: str, template: str) -> ReasoningTags | None:
    """The tags that a setting names; for `auto` those that the template's source shows."""
    if choice != "auto":
        return REASONING_TAGS.get(choice)
    return next((tags for tags in REASONING_TAGS.values() if tags.written_by(template)), None)
