"""Tool calls of Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": .., "arguments": {..}}, ..]`.

Granite 4 writes calls as Hermes. Source: the models' chat templates.
"""

from gllm.text.output.json_list_tool_call import list_format
from gllm.text.output.reasoning import ReasoningTags

FORMAT = list_format(
    "granite",
    "<|tool_call|>",
    "<|/tool_call|>",
    shown="<|tool_call|>",
    writes_closing=False,
    model_types=("granite", "granitemoe"),
)
REASONING = ReasoningTags(
    "granite",
    "<think>",
    "</think>",
    shown=("<response></response>",),
    answer_tags=("<response>", "</response>"),
)
