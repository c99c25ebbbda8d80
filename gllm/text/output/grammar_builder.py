"""A grammar of outputs that call a tool, for a model that has to.

Owns what all families' grammars have in common: reasoning may come first, then nothing but calls.
Written in llguidance's dialect of Lark. Knows nothing of what enforces it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gllm.text.output.reasoning import ReasoningTags

Schema = Mapping[str, Any]
"""A JSON schema."""
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
"""JSON as templates write it, which is what models are trained on; keywords that cannot be enforced
are not."""
_ANYTHING, _BLANKS = r"/(.|\n)*/", r"/[ \n]{0,4}/"


class GrammarBuilder:
    """The rules so far. Methods give the expression for something.

    token: the id of a vocabulary's entry, None where there is none.
    """

    def __init__(self, token: Callable[[str], int | None], markers: tuple[str, ...]) -> None:
        ids = {marker: token(marker) for marker in markers}
        self._ids = {marker: number for marker, number in ids.items() if number is not None}
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """This text. Markers that are tokens are those tokens: they cannot be spelled."""
        found = [(text.find(marker), marker) for marker in self._ids]
        places = [place for place in found if place[0] >= 0]
        if not places:
            return json.dumps(text, ensure_ascii=False) if text else ""
        at, marker = min(places)
        rest = text[at + len(marker) :]
        return _joined(self.text(text[:at]), f"<[{self._ids[marker]}]>", self.text(rest))

    def json(self, schema: Schema) -> str:
        """A value that fits a schema of a tool."""
        return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"

    def until(self, end: str) -> str:
        """Any text up to the first `end`, which belongs to it."""
        if end in self._ids:
            return f"{self.rule(_ANYTHING)} {self.text(end)}"
        return self.rule(_ANYTHING, f"[suffix={json.dumps(end)}]")

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def source(self, start: str) -> str:
        """The whole grammar."""
        made = "\n".join([f"start: {start}", *self._rules])
        # That is how other grammars are known; here it can only be within a text.
        return made.replace("::=", r":\u003a=")


def json_arguments_rule(grammar: GrammarBuilder, schema: Schema) -> str:
    """Return the expression of arguments as a JSON object."""
    return grammar.rule(grammar.json({"type": "object", **schema}))


@dataclass(frozen=True)
class ToolCallDelimiters:
    """How calls look as text. NAME stands for the tool's name."""

    before: str
    """In front of a call's arguments."""
    after: str
    opening: str = ""
    """In front of all calls."""
    between: str = ""
    closing: str = ""
    several: bool = True
    """Whether an answer may hold more than one."""
    arguments: Callable[[GrammarBuilder, Schema], str] = json_arguments_rule


def tool_call_rule(
    grammar: GrammarBuilder, written: ToolCallDelimiters, tools: Mapping[str, Schema], several: bool
) -> str:
    """The expression of a call of one of the tools, or of `several` calls."""
    calls = []
    for name, schema in tools.items():
        before = grammar.text(written.before.replace("NAME", name))
        arguments = written.arguments(grammar, schema)
        calls.append(grammar.rule(_joined(before, arguments, grammar.text(written.after))))
    call = grammar.rule(" | ".join(calls))
    more = ""
    if several and written.several:
        more = f"({_joined(grammar.text(written.between), call)})*"
    opening, closing = grammar.text(written.opening), grammar.text(written.closing)
    return grammar.rule(_joined(opening, call, more, closing))


def output_grammar(
    grammar: GrammarBuilder, answers: Sequence[str], tags: ReasoningTags | None, within: bool
) -> str:
    """The grammar of outputs that are one of the answers, which are expressions, or reasoning and
    then one of them.

    within: whether the output begins in the middle of reasoning.
    """
    return grammar.source(_joined(_reasoning(grammar, tags, within), f"({' | '.join(answers)})"))


def _joined(*parts: str) -> str:
    """Expressions one behind the other; empty ones stand for nothing."""
    return " ".join(filter(None, parts))


def _reasoning(grammar: GrammarBuilder, tags: ReasoningTags | None, within: bool) -> str:
    """What may come before the answer."""
    if tags is None:
        return ""
    rest = f"{grammar.until(tags.closing)} {grammar.rule(_BLANKS)}"
    return rest if within else f"({grammar.text(tags.opening)} {rest})?"
