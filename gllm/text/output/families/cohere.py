"""Tool calls of Command R7B and Command A: a list of JSON objects, between markers.

`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": .., "parameters": {..}}, ..]<|END_ACTION|>`.
Source: the models' chat templates.
"""

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.json_list_tool_call import parse_marked_lists
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallFormat

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
"""Markers around the list."""

FORMAT = ToolCallFormat(
    name="cohere",
    parse=parse_marked_lists(OPEN, CLOSE),
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: OPEN in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix='{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
        call_suffix="}",
        block_prefix=f"{OPEN}[",
        separator=", ",
        block_suffix=f"]{CLOSE}",
    ),
    model_types=("cohere2", "cohere2_moe", "cohere2_vision"),
)
REASONING = ReasoningTags(
    "cohere",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
