"""Tool calls written as a name, then keys and values between tags of their own.

A call is `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with and
without line ends between tags. A key or value also ends at the tag after its missing end tag.
"""

import re
from functools import partial

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_expression
from gllm.text.output.tool_calls import ToolCallEmitter

_NAME = re.compile(r"[^<\s]+")
_KEY = re.compile(r"[^<\n]+")


class KeyValueTags:
    """Tags of such a format, with its parser and its grammar.

    Args:
        suffix: End of the names of all tags.
        has_separator: A tag `<tool_sep>` follows the name of the tool.
    """

    def __init__(self, suffix: str = "", has_separator: bool = False) -> None:
        self.open, self.close = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        """Markers around a call."""
        self.block, self.block_end = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
        """Markers around all calls, in formats that have them."""
        self.separator = f"<tool_sep{suffix}>" if has_separator else ""
        self.key, self.key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        """Tags around the name of an argument."""
        self.value, self.value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        """Tags around the value of an argument."""
        self._value_stops = (
            self.value_end,
            f"\n{self.key}",
            self.key,
            f"\n{self.close}",
            self.close,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that are tokens of the vocabulary."""
        separator = (self.separator,) if self.separator else ()
        tags = (self.key, self.key_end, self.value, self.value_end)
        return (self.open, self.close, *separator, *tags)

    def parse_call(
        self, reader: TextReader, emitter: ToolCallEmitter, marker: str
    ) -> ParserCoroutine[bool]:
        """Parse the call after a marker: that of the call, or of a block of calls."""
        if marker != self.open and not (yield from reader.consume_next(self.open)):
            return False
        yield from reader.skip_space()
        name = yield from reader.read_while(_NAME)
        yield from reader.skip_space()
        if self.separator:
            yield from reader.consume_next(self.separator)
            yield from reader.skip_space()
        # A call needs a tag after the name, not just a word after the marker.
        tag = yield from reader.consume_any(self.key, self.close)
        if not tag or not emitter.start_call(name):
            return False
        arguments = TaggedArguments(emitter, name)
        while tag == self.key:
            key = yield from reader.read_while(_KEY)
            yield from reader.consume_any(self.key_end)
            if not (yield from reader.consume_next(self.value)):
                return False
            end = yield from arguments.parse(
                key.strip(), lambda sink: reader.consume_until(self._value_stops, sink)
            )
            if not end:
                return False
            tag = end.strip()
            if tag == self.value_end:
                tag = yield from reader.consume_next(self.key, self.close)
        if tag:
            arguments.finish()
        return bool(tag)

    def delimiters(self, has_block: bool) -> ToolCallDelimiters:
        """Return the texts around tool calls and their arguments, for grammars.

        Args:
            has_block: True if the tags of a block enclose all calls of an answer.
        """
        return ToolCallDelimiters(
            call_prefix=f"{self.open}NAME{self.separator}\n",
            call_suffix=f"{self.close}\n" if has_block else self.close,
            block_prefix=f"{self.block}\n" if has_block else "",
            separator="" if has_block else "\n",
            block_suffix=self.block_end if has_block else "",
            arguments_rule=partial(
                tagged_arguments_expression,
                start_tag=f"{self.key}KEY{self.key_end}\n{self.value}",
                end_tag=self.value_end,
                separator="\n",
            ),
        )
