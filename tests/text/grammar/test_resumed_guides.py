"""Guides that continue an output go on exactly as the guide that wrote it."""

import pytest

from gllm.config.sampling import StructuredOutput
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.worker.grammars import GuideFactory
from gllm.text.grammar.guide import GrammarGuide, GrammarGuideError
from tests.support.text.grammar_writing import EOS, compiled_grammar, grammars, state_of, write

NESTED = {
    "type": "array",
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["red", "green", "greenish"]}, "size": {"type": "number"}},
        "required": ["kind", "size"],
        "additionalProperties": False,
    },
}
WANTED = {
    "json": StructuredOutput(json=NESTED),
    "regex": StructuredOutput(regex="(blue|bread|red) [0-9]{2,3}(, (blue|bread|red) [0-9]{2,3})*"),
    "choice": StructuredOutput(choice=("yes, of course", "yes", "no, never", "no, not today")),
    "lark": StructuredOutput(grammar='start: pair+\npair: "(" (/[a-c]+/ | pair) ")"'),
    "any json": StructuredOutput(json={"type": "object"}),
}


@pytest.fixture(scope="module")
def factory() -> GuideFactory:
    return grammars()


def follow(
    guide: GrammarGuide, output: list[int], start: int
) -> tuple[list[int], dict[int, int | bytes]]:
    """Sample the rest of an output; what the guide returned, and what it allowed where."""
    reported: list[int] = []
    allowed: dict[int, int | bytes] = {}
    while start + len(reported) < len(output):
        index = start + len(reported)
        allowed[index] = guide.allowed_tokens(index)
        new = guide.accept_token(index, output[index])
        assert new
        reported += new
    return reported, allowed


@pytest.mark.parametrize(
    ("name", "forces"),
    [
        *((name, True) for name in WANTED),
        *(
            pytest.param(name, False, marks=[] if name == "choice" else pytest.mark.full)
            for name in WANTED
        ),
    ],
)
def test_every_cut_of_an_output(factory: GuideFactory, name: str, forces: bool) -> None:
    """Also within forced tokens: the rest of these comes with the next token."""
    logprobs = None if forces else 0
    grammar = compiled_grammar(WANTED[name])
    params = SequenceSamplingParams(grammar=grammar, logprobs=logprobs)
    num_forced = 0
    for seed in range(3):
        state = state_of(WANTED[name], factory, seed=seed, logprobs=logprobs)
        (output,) = write([state], 40, seed=seed)
        assert isinstance(output, list)
        guide = factory.create_guide(params)
        guide.first_mask.result(60)
        whole, masks = follow(guide, output, 0)
        assert whole[: len(output)] == output
        length = len(output) - (output[-1] == EOS)
        for cut in range(length):
            resumed = factory.create_guide(params, output[:cut])
            resumed.first_mask.result(60)
            reported, allowed = follow(resumed, output, cut)
            assert [*output[:cut], *reported] == whole
            for index in allowed.keys() & masks.keys():
                assert allowed[index] == masks[index], (cut, index)
        num_forced += len(whole) - len(masks)
    assert (num_forced > 0) == forces


def test_an_output_that_does_not_fit_fails_at_the_start(factory: GuideFactory) -> None:
    params = SequenceSamplingParams(grammar=compiled_grammar(WANTED["choice"]))
    guide = factory.create_guide(params, [5, 6, 7])
    with pytest.raises(GrammarGuideError, match="the grammar cannot go on"):
        guide.first_mask.result(60)


def test_a_row_waits_until_the_output_is_replayed(factory: GuideFactory) -> None:
    """The first index is not 0: the guide must not answer with a token of the output before."""
    wanted = StructuredOutput(regex="fixed text that is long")
    params = SequenceSamplingParams(grammar=compiled_grammar(wanted))
    whole = factory.create_guide(params)
    whole.first_mask.result(60)
    first = whole.allowed_tokens(0)
    assert isinstance(first, int)
    output = whole.accept_token(0, first)
    for cut in range(1, len(output) - 1):
        guide = factory.create_guide(params, output[:cut])
        # Not waiting for the first mask.
        assert guide.allowed_tokens(cut) == output[cut]
