"""The input of a custom tool's call does not depend on how its arguments arrive."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.text.output.parser import CustomToolInputDecoder

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def decoded(arguments, cuts):
    """The input that arguments cut at these places add up to."""
    made = CustomToolInputDecoder()
    bounds = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    return "".join(made.push(arguments[begin:end]) for begin, end in pairwise(bounds))


@given(
    TEXTS,
    st.booleans(),
    st.lists(st.integers(0, 300), max_size=8),
    st.sampled_from(["", " ", "\n "]),
)
def test_it_is_what_json_says(text, is_ascii, cuts, space):
    value = json.dumps(text, ensure_ascii=is_ascii)
    arguments = f'{space}{{{space}"input"{space}:{space}{value}{space}}}{space}'
    assert decoded(arguments, cuts) == text
    assert decoded(arguments, range(len(arguments))) == text


@pytest.mark.parametrize(
    "arguments", ['{"other": "x"}', "[1]", '{"input": 7}', '{"input": ["a"]}', "{}"]
)
def test_arguments_of_another_form_are_the_input(arguments):
    assert decoded(arguments, ()) == decoded(arguments, range(len(arguments))) == arguments


def test_what_is_cut_off_or_broken():
    assert decoded('{"input": "ab\\', ()) == "ab"
    assert decoded('{"input": "ab\\ud83c', ()) == "ab"
    assert decoded('{"input": "a\\ud83cb"}', ()) == "a\ufffdb"
    assert decoded('{"input": "a\\ud83c\\n"}', range(30)) == "a\ufffd\n"
    assert decoded('{"input": "a\\udc00b"}', range(30)) == "a\ufffdb"
    assert decoded('{"inp', ()) == ""
