"""Tool calls of GLM-4.5 and later: `<tool_call>NAME`, tagged keys and values, `</tool_call>`.

Arguments are `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, in 4.5 and 4.6 with line ends
between tags, in 4.7 and 5 without. Source: the models' chat templates.
"""

from gllm.text.output.key_value_tool_call import KeyValueTags
from gllm.text.output.tool_calls import ToolCallFormat, parse_marked_calls

TAGS = KeyValueTags()
"""The format's tags."""
FORMAT = ToolCallFormat(
    name="glm45",
    parse=parse_marked_calls((TAGS.open,), (TAGS.close,), TAGS.parse_call),
    markers=TAGS.markers,
    is_used_by=lambda template: TAGS.key in template,
    delimiters=lambda template: TAGS.delimiters(has_block=False),
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
)
