"""Tool calls of Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: functions and parameters as tags.

A call is `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` with
line ends between all tags and values. Source: the models' chat templates.
"""

from gllm.text.output.xml_tool_call import XmlTags, xml_format

TAGS = XmlTags(
    blocks=("<tool_call>",),
    block_ends=("</tool_call>",),
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    has_value_lines=True,
)
"""The format's tags."""
FORMAT = xml_format("qwen3_coder", TAGS, "<parameter=", ("qwen3_5", "qwen3_5_moe", "nemotron_h"))
