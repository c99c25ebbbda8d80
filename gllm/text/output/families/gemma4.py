"""Tool calls of Gemma 4: `<|tool_call>call:NAME{KEY:VALUE,..}<tool_call|>`.

Values are JSON without spaces, but keys have no quotes, and strings stand verbatim between quote
tokens, `<|"|>`. Source: the models' chat templates.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gllm.text.grammar.sources.json_schema import resolve_reference
from gllm.text.output.argument_schemas import ArgumentSchemas, StringRules
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    Schema,
    ToolCallDelimiters,
    separated_expression,
)
from gllm.text.output.literal_parser import LiteralSyntax, parse_literal
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tagged_tool_call import string_rule
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
"""Markers around a call, and the token around a string."""
SYNTAX = LiteralSyntax((QUOTE, '"'), has_escapes=False, has_bare_keys=True)
"""Syntax of the arguments; models write plain quotes at times."""
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NAME = re.compile(r"[^\s{<]+")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, _: str) -> ParserCoroutine[bool]:
    if not (yield from reader.consume_next("call:")):
        return False
    yield from reader.skip_space()
    name = yield from reader.read_while(_NAME)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{" or not emitter.start_call(name):
        return False
    if not (yield from parse_literal(reader, emitter.add_arguments, SYNTAX)):
        return False
    yield from reader.consume_next(CLOSE)
    return True


class _ValueGrammar:
    """Builds expressions of values from their schemas.

    Args:
        grammar: Receives the rules.
        root: Schema of the arguments, for references.
        is_strict: Raise an error for a rule of a string that cannot be enforced.
    """

    def __init__(self, grammar: GrammarBuilder, root: Schema, is_strict: bool) -> None:
        self._grammar = grammar
        self._root = root
        self._is_strict = is_strict
        self._definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        self._any = ""
        self._values: dict[int, str] = {}
        """Expressions by the id of the schema; any value for a schema within itself."""
        self._kept: list[ArgumentSchemas] = []
        """Owners of schemas, whose ids have to stay theirs."""

    def members(self, schema: Schema) -> str:
        """Return the expression of an object without its braces, members in the schema's order."""
        arguments = ArgumentSchemas({**self._definitions, **schema})
        self._kept.append(arguments)
        members = []
        for name, is_required in arguments.names.items():
            if arguments.find_types(name) == {"string"}:
                value = self._string(arguments.find_string_rules(name))
            else:
                value = self.value(arguments.find(name))
            members.append((f"{self._grammar.literal(f'{name}:')} {value}", is_required))
        return separated_expression(self._grammar, members, ",")

    def value(self, schema: object) -> str:
        """Return the expression of a value that matches a schema."""
        if not isinstance(schema, Mapping):
            return self.any_value()
        if id(schema) not in self._values:
            self._values[id(schema)] = self.any_value()
            self._values[id(schema)] = self._new_value(schema)
        return self._values[id(schema)]

    def _new_value(self, schema: Schema) -> str:
        if "$ref" in schema:
            return self.value(resolve_reference(self._root, schema["$ref"]))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            return self._alternatives(self._grammar.literal(_written(value)) for value in listed)
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and (len(parts) == 1 or (parts and keyword != "allOf")):
                return self._alternatives(self.value(part) for part in parts)
        types = schema.get("type")
        if isinstance(types, str | list) and types:
            names = [types] if isinstance(types, str) else types
            return self._alternatives(self._typed(name, schema) for name in names)
        return self.any_value()

    def _typed(self, name: object, schema: Schema) -> str:
        grammar = self._grammar
        match name:
            case "string":
                return self._string(StringRules([schema], {}))
            case "integer" | "number" | "boolean" | "null":
                bounds = {key: schema[key] for key in NUMBER_KEYWORDS if key in schema}
                return grammar.add_rule(grammar.json_value({"type": name, **bounds}))
            case "array":
                item = self.value(schema.get("items"))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object" if schema.get("properties"):
                return f'"{{" {self.members(schema)} "}}"'
            case _:
                return self.any_value()

    def _string(self, rules: StringRules) -> str:
        text = string_rule(self._grammar, rules, QUOTE, self._is_strict)
        return f"{self._grammar.literal(QUOTE)} {text}"

    def any_value(self) -> str:
        """Return the expression of a value of any type."""
        if not self._any:
            grammar = self._grammar
            scalar = grammar.json_value({"type": ["number", "boolean", "null"]})
            text = f"{grammar.literal(QUOTE)} {grammar.text_until(QUOTE)}"
            key = "/[A-Za-z0-9_.-]+/"

            def body(name: str) -> str:
                members = f'({key} ":" {name} ("," {key} ":" {name})*)?'
                items = f'({name} ("," {name})*)?'
                return f'{scalars} | {text} | "[" {items} "]" | "{{" {members} "}}"'

            scalars = grammar.add_rule(scalar)
            self._any = grammar.add_recursive_rule(body)
        return self._any

    def _alternatives(self, expressions: Iterable[str]) -> str:
        return self._grammar.add_rule(" | ".join(expressions))


def _written(value: Any) -> str:
    """Return a value as the template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)


def _arguments_rule(grammar: GrammarBuilder, schema: Schema, is_strict: bool) -> str:
    return _ValueGrammar(grammar, schema, is_strict).members(schema)


FORMAT = ToolCallFormat(
    name="gemma4",
    parse=parse_marked_calls((OPEN,), (CLOSE,), _parse_call),
    markers=(OPEN, CLOSE, QUOTE),
    is_used_by=lambda template: f"{OPEN}call:" in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{OPEN}call:NAME{{",
        call_suffix=f"}}{CLOSE}",
        arguments_rule=_arguments_rule,
    ),
    model_types=("gemma4", "gemma4_text", "gemma4_unified"),
)
REASONING = ReasoningTags(
    "gemma4", "<|channel>thought", "<channel|>", markers=("<|channel>", "<channel|>")
)
