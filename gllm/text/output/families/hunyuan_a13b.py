"""Tool calls of Hunyuan A13B and Apriel: `<tool_calls>[{"name": .., "arguments": {..}}, ..]`.

`</tool_calls>` follows the list. Source: the models' chat templates.
"""

from gllm.text.output.json_list_tool_call import list_format
from gllm.text.output.reasoning import ReasoningTags

FORMAT = list_format(
    "hunyuan_a13b",
    "<tool_calls>",
    "</tool_calls>",
    shown="<tool_calls>[",
    model_types=("hunyuan_v1_moe", "hunyuan_v1_dense"),
)
REASONING = ReasoningTags(
    "hunyuan_a13b",
    "<think>",
    "</think>",
    shown=("<answer>",),
    answer_tags=("<answer>", "</answer>"),
)
