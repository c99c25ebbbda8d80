"""Tool calls of MiniMax M2: a block of elements `invoke`, with an element per parameter.

A block is `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
</minimax:tool_call>` with line ends between the tags, for any number of calls. Source: the models'
chat templates.
"""

from gllm.text.output.xml_tool_call import XmlTags, xml_format

TAGS = XmlTags(
    blocks=("<minimax:tool_call>",),
    block_ends=("</minimax:tool_call>",),
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    name_end='">',
    key_ends=('">',),
    has_calls_in_block=True,
)
"""The format's tags."""
FORMAT = xml_format("minimax_m2", TAGS, "<minimax:tool_call>", ("minimax_m2",))
