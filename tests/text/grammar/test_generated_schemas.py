"""Random schemas over every keyword: texts that come to an end are what the schema says."""

import json
from collections import Counter
from random import Random

import jsonschema
import pytest

from gllm.config.sampling import StructuredOutput
from gllm.text.grammar.sources.json_schema import KEYWORDS
from tests.support.text.grammar_writing import EOS, grammars, state_of, text_of, write
from tests.support.text.random_schemas import schema

LIMIT = 1500
"""Tokens of a text."""
AT_ONCE = 50
VALIDATOR = jsonschema.Draft202012Validator


def keys(value):
    """The keys of all objects in a value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from keys(one)


@pytest.mark.parametrize(
    "count",
    [
        15,
        pytest.param(60, marks=pytest.mark.full),
        pytest.param(200, marks=pytest.mark.long),
    ],
)
def test_texts_that_end_fit_their_schemas(count):
    schemas = [schema(Random(seed)) for seed in range(count)]
    used = Counter(key for one in schemas for key in keys(one))
    # additionalItems is of drafts that this validator does not read.
    tried = KEYWORDS.keys() - {"additionalItems"}
    if count >= 60:
        assert all(used[keyword] >= count // 60 for keyword in tried), "every keyword is tried"
    owner = grammars()
    complete = 0
    for begin in range(0, count, AT_ONCE):
        part = schemas[begin : begin + AT_ONCE]
        states = [
            state_of(StructuredOutput(json=one), owner, seed=begin + at)
            for at, one in enumerate(part)
        ]
        for one, output in zip(part, write(states, LIMIT, begin), strict=True):
            assert isinstance(output, list), output
            if output[-1] == EOS:
                complete += 1
                value = json.loads(text_of(output))
                VALIDATOR(one, format_checker=VALIDATOR.FORMAT_CHECKER).validate(value)
    assert complete >= 0.95 * count


@pytest.mark.full
def test_the_validator_would_see_a_text_that_does_not_fit():
    """The check above can fail: a text of one schema is seldom one of another."""
    owner = grammars()
    schemas = [schema(Random(seed)) for seed in range(20)]
    states = [state_of(StructuredOutput(json=one), owner, seed=1) for one in schemas]
    texts = [text_of(one) for one in write(states, LIMIT) if one[-1] == EOS]
    other = {"type": "object", "required": ["nobody writes this"]}
    assert not any(VALIDATOR(other).is_valid(json.loads(text)) for text in texts)
