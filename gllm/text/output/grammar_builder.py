"""Build grammars of outputs with tool calls, in llguidance's dialect of Lark.

Contains the parts that all formats share: an optional reasoning section, then nothing but calls.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gllm.text.output.reasoning import ReasoningTags

Schema = Mapping[str, Any]
"""A JSON Schema."""
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
"""Style of JSON values: spaced as chat templates write them, which models are trained on; keywords
that cannot be enforced are ignored."""
_ANYTHING = r"/(.|\n)*/"
"""Expression of any text."""
MAX_CHARACTERS = 2**18
"""Size limit of a grammar while it is built, above that of a grammar to compile: a schema whose
definitions each of its properties repeats could fill the memory."""
_BLANKS = r"/[ \n]{0,4}/"
"""Expression of the whitespace after a reasoning section."""


class GrammarBuilder:
    """Builds a Lark grammar for llguidance; its methods return expressions for use in rules.

    Args:
        token_id: Returns the id of a token; None if the vocabulary does not have it.
        markers: Texts that are written as single tokens if the vocabulary has them.
    """

    def __init__(self, token_id: Callable[[str], int | None], markers: tuple[str, ...]) -> None:
        ids = {marker: token_id(marker) for marker in markers}
        self._ids = {marker: number for marker, number in ids.items() if number is not None}
        # The longest first: one marker may be the beginning of another.
        names = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._marker = re.compile(f"({'|'.join(names)})" if names else "(?!)")
        self._rules: list[str] = []
        self._num_characters = 0

    def literal(self, text: str) -> str:
        """Return the expression of a fixed text; markers become special tokens."""
        parts = filter(None, self._marker.split(text))
        return _join(
            *(
                f"<[{self._ids[part]}]>"
                if part in self._ids
                else json.dumps(part, ensure_ascii=False)
                for part in parts
            )
        )

    def json_value(self, schema: Schema) -> str:
        """Return the expression of a JSON value that matches a schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"

    def text_until(self, end: str, text: str = _ANYTHING) -> str:
        """Return the expression of a text up to and including the first `end`.

        Args:
            end: The text after it.
            text: Expression of the text; that of any text by default.
        """
        begin, *rest = self._marker.split(end, maxsplit=1)
        if not rest:
            return self.add_rule(text, f"[suffix={json.dumps(end)}]")
        if not begin:
            return f"{self.add_rule(text)} {self.literal(end)}"
        # A text that contains the beginning of the end goes on after it.
        part = self.add_rule(text, f"[suffix={json.dumps(begin)}]")
        return f"{part}{'+' if text == _ANYTHING else ''} {self.literal(''.join(rest))}"

    def add_terminal(self, body: str) -> str:
        """Add a terminal, whose expressions may be intersected by `&`, and return its name."""
        return self._add("T", body, "")

    def add_recursive_rule(self, make_body: Callable[[str], str]) -> str:
        """Add a rule whose body contains its own name, and return the name."""
        name = f"r{len(self._rules)}"
        self._rules.append("")
        index = len(self._rules) - 1
        self._rules[index] = f"{name}: {make_body(name)}"
        return name

    def add_rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name. Raises ValueError if the grammar is too large."""
        return self._add("r", body, attributes)

    def _add(self, kind: str, body: str, attributes: str) -> str:
        self._num_characters += len(body)
        if self._num_characters > MAX_CHARACTERS:
            raise ValueError(f"its grammar has more than {MAX_CHARACTERS} characters")
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def to_lark(self, start: str) -> str:
        """Return the text of the grammar with a start expression."""
        grammar = "\n".join([f"start: {start}", *self._rules])
        # "::=" marks a grammar as GBNF; here it can only be part of a text.
        return grammar.replace("::=", r":\u003a=")


def separated_expression(
    grammar: GrammarBuilder, members: Sequence[tuple[str, bool]], separator: str
) -> str:
    """Return the expression of members in their order, some of which may be left out.

    Args:
        grammar: Receives the rules.
        members: Expression of each member; True for those that are required.
        separator: Text between two members.
    """
    comma = grammar.literal(separator)
    first, more = "", ""
    for member, is_required in reversed(members):
        start = _join(member, more)
        if not is_required:
            start = f"({start} | {first})" if first else f"({start})?"
        first = grammar.add_rule(start)
        following = _join(comma, member)
        more = grammar.add_rule(_join(following if is_required else f"({following})?", more))
    return first


def add_json_arguments_rule(grammar: GrammarBuilder, schema: Schema, is_strict: bool) -> str:
    """Add a grammar rule for tool call arguments written as a JSON object; return its name.

    The same rules of a schema are enforced whether the tool is strict or not.
    """
    return grammar.add_rule(grammar.json_value({"type": "object", **schema}))


@dataclass(frozen=True)
class ToolCallDelimiters:
    """Texts before, between and after tool calls in an output.

    NAME stands for the tool's name, and INDEX for the digits of an id.
    """

    call_prefix: str
    """Text before the arguments of a call."""
    call_suffix: str
    """Text after the arguments of a call."""
    block_prefix: str = ""
    """Text before all calls."""
    separator: str = ""
    """Text between two calls."""
    block_suffix: str = ""
    """Text after all calls."""
    allows_parallel: bool = True
    """True if an answer may contain more than one call."""
    arguments_rule: Callable[[GrammarBuilder, Schema, bool], str] = add_json_arguments_rule
    """Returns the expression of arguments that fit a schema; True if the tool is strict, so that a
    rule that cannot be enforced raises a ValueError."""


def add_tool_call_rule(
    grammar: GrammarBuilder,
    delimiters: ToolCallDelimiters,
    tool_schemas: Mapping[str, Schema],
    allows_parallel: bool,
    strict_tools: Collection[str] = (),
) -> str:
    """Add a grammar rule for one or more calls of the given tools; return its name.

    Args:
        grammar: Receives the rule.
        delimiters: Texts around the calls and their arguments.
        tool_schemas: JSON Schema of the arguments by name of the tool.
        allows_parallel: True to allow more than one call, if the format does.
        strict_tools: Names of the tools whose schema has to be enforced as a whole.

    Raises:
        ValueError: The schema of a strict tool cannot be enforced, or the grammar is too large.
    """
    calls = []
    for name, schema in tool_schemas.items():
        prefix = _prefix_expression(grammar, delimiters.call_prefix, name)
        try:
            arguments = delimiters.arguments_rule(grammar, schema, name in strict_tools)
        except ValueError as error:
            raise ValueError(f"the function {name!r}: {error}") from error
        calls.append(
            grammar.add_rule(_join(prefix, arguments, grammar.literal(delimiters.call_suffix)))
        )
    call = grammar.add_rule(" | ".join(calls))
    more = ""
    if allows_parallel and delimiters.allows_parallel:
        more = f"({_join(grammar.literal(delimiters.separator), call)})*"
    prefix = grammar.literal(delimiters.block_prefix)
    suffix = grammar.literal(delimiters.block_suffix)
    return grammar.add_rule(_join(prefix, call, more, suffix))


def _prefix_expression(grammar: GrammarBuilder, call_prefix: str, name: str) -> str:
    """Return the expression of the text before the arguments of a tool's calls."""
    parts = [grammar.literal(part.replace("NAME", name)) for part in call_prefix.split("INDEX")]
    return parts[0] if len(parts) == 1 else f" {grammar.add_rule('/[0-9]{1,3}/')} ".join(parts)


def build_output_grammar(
    grammar: GrammarBuilder,
    answers: Sequence[str],
    tags: ReasoningTags | None,
    starts_in_reasoning: bool,
) -> str:
    """Return the Lark grammar of an output: an optional reasoning section, then one of the answers.

    Args:
        grammar: Builder with the rules that the answers refer to.
        answers: Lark expressions of the permitted answers.
        tags: Tags of the reasoning section; None without one.
        starts_in_reasoning: True if the output begins inside the reasoning section.
    """
    section = _reasoning_section(grammar, tags, starts_in_reasoning)
    return grammar.to_lark(_join(section, f"({' | '.join(answers)})"))


def _join(*parts: str) -> str:
    """Return the concatenation of expressions; empty ones are left out."""
    return " ".join(filter(None, parts))


def _reasoning_section(
    grammar: GrammarBuilder, tags: ReasoningTags | None, starts_in_reasoning: bool
) -> str:
    """Return the expression of a reasoning section."""
    if tags is None:
        return ""
    remainder = f"{grammar.text_until(tags.closing)} {grammar.add_rule(_BLANKS)}"
    return remainder if starts_in_reasoning else f"({grammar.literal(tags.opening)} {remainder})?"
