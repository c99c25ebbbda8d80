"""Tool calls of DeepSeek V3.2 and V4: a block of elements, whose tags contain ｜DSML｜.

An element for a parameter says if its value is a string, or JSON. The block is `function_calls` in
V3.2 and `tool_calls` in V4. Source: the models' chat templates and encoders.
"""

from dataclasses import replace

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.tool_calls import ToolCallFormat
from gllm.text.output.xml_tool_call import XmlTags, parse_xml_calls, xml_delimiters

PREFIX = "｜DSML｜"
"""Beginning of the names of all tags."""
TAGS = XmlTags(
    blocks=(f"<{PREFIX}function_calls>", f"<{PREFIX}tool_calls>"),
    block_ends=(f"</{PREFIX}function_calls>", f"</{PREFIX}tool_calls>"),
    function=f'<{PREFIX}invoke name="',
    function_end=f"</{PREFIX}invoke>",
    parameter=f'<{PREFIX}parameter name="',
    parameter_end=f"</{PREFIX}parameter>",
    name_end='">',
    key_ends=('" string="true">', '" string="false">'),
    has_calls_in_block=True,
)
"""Tags of both models, those of V3.2 first."""
TAGS_OF_V4 = replace(TAGS, blocks=TAGS.blocks[::-1], block_ends=TAGS.block_ends[::-1])


def _delimiters(template: str) -> ToolCallDelimiters:
    """Return the delimiters of V3.2 if the template has its block, else those of V4."""
    tags = TAGS if "function_calls" in template else TAGS_OF_V4
    return xml_delimiters(tags)(template)


FORMAT = ToolCallFormat(
    name="deepseek_v32",
    parse=parse_xml_calls(TAGS),
    markers=(PREFIX, *TAGS.markers),
    is_used_by=lambda template: PREFIX in template,
    delimiters=_delimiters,
    model_types=("deepseek_v32", "deepseek_v4"),
)
