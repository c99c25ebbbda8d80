"""Tool calls of Seed-OSS: functions and parameters as tags, values without lines of their own.

A call is `<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>
</seed:tool_call>` with line ends between the tags. Values are written as Python does. Source: the
model's chat template.
"""

from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.xml_tool_call import XmlTags, xml_format

TAGS = XmlTags(
    blocks=("<seed:tool_call>",),
    block_ends=("</seed:tool_call>",),
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
)
"""The format's tags."""
FORMAT = xml_format("seed_oss", TAGS, "<seed:tool_call>", ("seed_oss",))
REASONING = ReasoningTags("seed_oss", "<seed:think>", "</seed:think>")
