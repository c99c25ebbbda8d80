"""Tool calls of Hunyuan 3: a block of calls with tagged keys and values, after `<tool_sep>`.

A block is `<tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
</tool_call></tool_calls>` with line ends between the tags, which end in `:opensource` in later
models. Source: the models' chat templates.
"""

from gllm.text.output.key_value_tool_call import KeyValueTags
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

PREVIEW, PUBLISHED = KeyValueTags("", True), KeyValueTags(":opensource", True)
"""Tags of the preview and of later models."""
OPENINGS = {tag: tags for tags in (PUBLISHED, PREVIEW) for tag in (tags.block, tags.open)}
"""Tags by the marker before a call."""


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    return (yield from OPENINGS[marker].parse_call(reader, emitter, marker))


FORMAT = ToolCallFormat(
    name="hy_v3",
    parse=parse_marked_calls(
        tuple(OPENINGS),
        (PUBLISHED.close, PUBLISHED.block_end, PREVIEW.close, PREVIEW.block_end),
        _parse_call,
    ),
    markers=tuple(
        tag for tags in (PUBLISHED, PREVIEW) for tag in (tags.block, tags.block_end, *tags.markers)
    ),
    is_used_by=lambda template: "<tool_sep" in template and "<arg_key" in template,
    delimiters=lambda template: (PUBLISHED if ":opensource" in template else PREVIEW).delimiters(
        has_block=True
    ),
    model_types=("hy_v3",),
)
REASONING = ReasoningTags(
    "hy_v3",
    "<think:opensource>",
    "</think:opensource>",
    shown=("<think{}>", "<think:opensource>"),
)
