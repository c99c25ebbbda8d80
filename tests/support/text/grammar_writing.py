"""Writes texts under grammars as the last stage does, with random numbers for a model."""

from pathlib import Path

import torch
from torch import Tensor

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.grammars import GuideFactory
from gllm.runtime.worker.sampling import (
    SampleOutput,
    SamplingState,
    build_sampling_metadata,
    create_sampling_states,
)
from gllm.text.grammar.compiler_process import compile_grammar
from gllm.text.grammar.sources.structured_output import to_grammar_source
from gllm.text.grammar.vocabulary import load_grammar_tokenizer
from gllm.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[3] / "gllm" / "demo"
VOCABULARY = 2048
EOS = 2
TOKENS = load_grammar_tokenizer(FOLDER, VOCABULARY, (EOS,))
TOKENIZER = Tokenizer.load(FOLDER)


def grammars(**limits: int) -> GuideFactory:
    """Of the demo model."""
    return GuideFactory(FOLDER, VOCABULARY, (EOS,), **limits)


def compile_output(wanted) -> tuple[str, str]:
    """A structured output's grammar, or why there is none."""
    grammar, error = compile_grammar(list(to_grammar_source(wanted)), TOKENS)
    return grammar, error


def compiled_grammar(wanted) -> str:
    grammar, error = compile_output(wanted)
    assert not error, error
    return grammar


def state_of(wanted, owner: GuideFactory, **spec) -> SamplingState:
    """The state of a sequence that has to write a structured output."""
    sampling = SequenceSamplingParams(grammar=compiled_grammar(wanted), **spec)
    return create_sampling_states(RegisterSequences(0, 1, [], sampling), owner)[0]


def step(states: list[SamplingState], indices: list[int], logits: Tensor) -> SampleOutput:
    """One draw; logits [rows, vocabulary]."""
    owners = [(row, 0) for row in range(len(states))]
    return sample_rows(logits.clone(), build_sampling_metadata(owners, states, indices))


def punctuation() -> Tensor:
    """[vocabulary]: what a model of noise needs to come to an end now and then."""
    closes = [set(TOKENIZER.decode([token], False)) <= set('"}],:') for token in range(VOCABULARY)]
    return torch.tensor(closes) * 6.0


def write(states: list[SamplingState], limit: int, seed: int = 0) -> list[list[int] | str]:
    """Each sequence's output, as long as they are; its error where it has one."""
    noise = torch.Generator().manual_seed(seed)
    prefers = punctuation()
    outputs: list[list[int]] = [[] for _ in states]
    ended: dict[int, list[int] | str] = {}
    while alive := [row for row in range(len(states)) if row not in ended]:
        logits = prefers + torch.randn(len(alive), VOCABULARY, generator=noise)
        indices = [len(outputs[row]) for row in alive]
        drawn = step([states[row] for row in alive], indices, logits)
        for at, row in enumerate(alive):
            outputs[row] += [drawn.tokens[at], *drawn.forced_tokens.get(at, ())]
            if drawn.errors[at]:
                ended[row] = drawn.errors[at]
            elif outputs[row][-1] == EOS or len(outputs[row]) >= limit:
                ended[row] = outputs[row]
    return [ended[row] for row in range(len(states))]


def text_of(output: list[int] | str) -> str:
    """Return a whole output as text; an error fails."""
    assert isinstance(output, list), output
    return TOKENIZER.decode([token for token in output if token != EOS], False)
