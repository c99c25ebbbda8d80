"""Convert arguments written as tagged values into a JSON object.

The tool's schema gives the types. A string is streamed while it arrives, any other value when it is
complete.
"""

import ast
import json
from collections.abc import Callable, Set

from gllm.text.output import json_parser
from gllm.text.output.argument_schemas import (
    ArgumentSchemas,
    StringRules,
    is_of_type,
)
from gllm.text.output.grammar_builder import GrammarBuilder, Schema
from gllm.text.output.reader import ParserCoroutine, TextSink
from gllm.text.output.tool_calls import ToolCallEmitter

_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""JSON texts of Python's constants, which models write at times."""
MAX_LITERAL_CHARACTERS = 2**16
"""Longest value that is read as a Python literal; reading one blocks other threads."""


class TaggedArguments:
    """Converts tool call arguments written between tags into the text of a JSON object.

    Args:
        emitter: Receives the JSON text.
        name: Name of the tool.
    """

    def __init__(self, emitter: ToolCallEmitter, name: str) -> None:
        self._emitter = emitter
        self._schemas = emitter.find_argument_schemas(name)
        self._num_arguments = 0

    def finish(self) -> None:
        """Emit the end of the JSON object."""
        self._emitter.add_arguments("}" if self._num_arguments else "{}")

    def parse(
        self,
        key: str,
        parse_value: Callable[[TextSink], ParserCoroutine[str]],
        is_string: bool = False,
    ) -> ParserCoroutine[str]:
        """Parse the value of an argument and emit it.

        Args:
            key: Name of the argument.
            parse_value: Parses the value, passes its text to a sink and returns its end tag.
            is_string: The value is a string, whatever the schema says.

        Returns:
            The end tag.
        """
        types = self._schemas.find_types(key)
        lead = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._emitter.add_arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if is_string or types == {"string"}:
            self._emitter.add_arguments('"')
            end = yield from parse_value(lambda text: self._emitter.add_arguments(_escape(text)))
            self._emitter.add_arguments('"')
            return end
        pieces: list[str] = []
        end = yield from parse_value(pieces.append)
        self._emitter.add_arguments(to_typed_json("".join(pieces), types))
        return end


def tagged_arguments_expression(
    grammar: GrammarBuilder,
    schema: Schema,
    is_strict: bool,
    *,
    start_tag: str,
    end_tag: str,
    separator: str,
    string_start_tag: str = "",
) -> str:
    """Return the Lark expression of arguments written between tags, in the order of the schema.

    Args:
        grammar: Receives the rules.
        schema: JSON Schema of the arguments.
        is_strict: Raise an error for a rule of the schema that cannot be enforced.
        start_tag: Text before a value; KEY stands for the argument's name.
        end_tag: Text after a value.
        separator: Text after the end tag.
        string_start_tag: Text before a value that is a string; empty for `start_tag`.

    Raises:
        ValueError: The function is strict, and a rule of its schema cannot be enforced.
    """
    parts = []
    arguments = ArgumentSchemas(schema)
    for key, is_required in arguments.names.items():
        if arguments.find_types(key) == {"string"}:
            tag = string_start_tag or start_tag
            value = string_rule(grammar, arguments.find_string_rules(key), end_tag, is_strict)
        else:
            tag = start_tag
            value = json_rule(grammar, schema, arguments.find(key), end_tag)
        start = grammar.literal(tag.replace("KEY", key))
        argument = grammar.add_rule(f"{start} {value} {grammar.literal(separator)}")
        parts.append(argument if is_required else f"{argument}?")
    return " ".join(parts)


def json_rule(grammar: GrammarBuilder, root: Schema, schema: Schema, end_tag: str) -> str:
    """Return the expression of a value that is written as JSON, and its end tag."""
    text = grammar.json_value(schema)
    if '"$ref"' in text:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        text = grammar.json_value({**schema, **definitions})
    return f"{grammar.add_rule(text)} {grammar.literal(end_tag)}"


def string_rule(grammar: GrammarBuilder, rules: StringRules, end_tag: str, is_strict: bool) -> str:
    """Return the expression of a string and its end tag.

    Raises:
        ValueError: The function is strict, and a rule of its schema cannot be enforced.
    """
    if is_strict and rules.unsupported:
        raise ValueError(
            f"the keyword {min(rules.unsupported)!r} of a string is not supported by the tool call "
            "format of this model, which writes strings without quotes"
        )
    if rules.values is not None and not rules.expressions:
        words = [grammar.literal(word) or '""' for word in rules.values]
        if not words:
            raise ValueError("no string fits its schema")
        return f"({' | '.join(words)}) {grammar.literal(end_tag)}"
    if not rules.expressions:
        return grammar.text_until(end_tag)
    expressions = rules.expressions
    if rules.values is not None:
        expressions = [f"({' | '.join(map(_quoted, rules.values))})", *expressions]
    return grammar.text_until(end_tag, grammar.add_terminal(" & ".join(expressions)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def to_typed_json(text: str, types: Set[str]) -> str:
    """Convert an argument's text to JSON of one of the types, or to a JSON string if impossible.

    Unless a string is permitted, Python's True, False, None, lists and dictionaries are accepted as
    well.
    """
    candidates = [text.strip()]
    if "string" not in types:
        candidates.append(
            _PYTHON_CONSTANTS.get(candidates[0], "") or _python_as_json(candidates[0])
        )
    for candidate in candidates:
        try:
            value = json_parser.load_json(candidate)
        except ValueError:
            continue
        if any(is_of_type(value, name) for name in types):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _python_as_json(text: str) -> str:
    """Return the JSON of a Python list or dictionary; empty if the text is none."""
    if text[:1] not in ("[", "{") or len(text) > MAX_LITERAL_CHARACTERS:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""


def _escape(text: str) -> str:
    """Return text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
