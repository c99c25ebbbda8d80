"""Tokens of several kinds of tokenizers, padded or cut to the model's vocabulary."""

import json
from pathlib import Path
from random import Random

import pytest
from llguidance import LLMatcher

from gllm.config.sampling import StructuredOutput
from gllm.text.grammar.compiler_process import compile_grammar
from gllm.text.grammar.sources.structured_output import to_grammar_source
from gllm.text.grammar.vocabulary import create_parser_limits, load_grammar_tokenizer
from gllm.text.tokenizer import Tokenizer
from tests.support.text.grammar_writing import EOS
from tests.support.text.tokenizers import byte_level, metaspace, save, sentencepiece, word_piece

SCHEMA = {
    "type": "object",
    "properties": {"the name": {"type": "string", "maxLength": 6}, "b": {"enum": ["x y", "ü"]}},
    "required": ["the name", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("more", [0, 37, -20])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_text_of_its_tokens_fits(tmp_path: Path, kind, more: int) -> None:
    backend = kind()
    backend.enable_truncation(3)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    size = tokenizer.vocab_size + more
    tokens = load_grammar_tokenizer(tmp_path, size, (size + 3, EOS))
    assert tokens.eos_tokens == [EOS]
    grammar, _ = compile_grammar(list(to_grammar_source(StructuredOutput(json=SCHEMA))), tokens)
    matcher = LLMatcher(tokens, grammar, limits=create_parser_limits())
    output: list[int] = []
    chance = Random(1)
    while not matcher.is_stopped():
        output += (forced := matcher.compute_ff_tokens())
        matcher.consume_tokens(forced)
        mask = matcher.compute_bitmask()
        allowed = [t for t in range(size) if mask[t // 8] >> t % 8 & 1 and t != EOS]
        if allowed and not matcher.is_stopped():
            output.append(chance.choice(allowed))
            matcher.consume_token(output[-1])
    text = tokenizer.decode(output)
    assert json.loads(text).keys() == {"the name", "b"}


@pytest.mark.parametrize("kind", [metaspace, word_piece])
def test_kinds_without_grammars_are_told(tmp_path: Path, kind) -> None:
    folder = save(tmp_path, kind())
    with pytest.raises(ValueError, match="tokenizer does not support grammars"):
        load_grammar_tokenizer(folder, 5, (2,))


def test_some_token_has_to_end_a_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no token that ends"):
        load_grammar_tokenizer(save(tmp_path, byte_level()), 402, (402,))


@pytest.mark.parametrize("text", ["<|im_end|>", "so: <|im_end|>  <|im_end|> ü"])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_forced_text_may_spell_a_special_token(tmp_path: Path, kind, text: str) -> None:
    backend = kind()
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    tokens = load_grammar_tokenizer(tmp_path, tokenizer.vocab_size, (EOS,))
    for wanted in (StructuredOutput(choice=(text,)), StructuredOutput(json={"const": text})):
        grammar, error = compile_grammar(list(to_grammar_source(wanted)), tokens)
        assert error == ""
        matcher = LLMatcher(tokens, grammar, limits=create_parser_limits())
        forced = matcher.compute_ff_tokens()
        assert matcher.consume_tokens(forced)
        assert matcher.is_stopped()
        assert tokenizer.token_to_id("<|im_end|>") not in forced
        assert tokens.decode_str(forced) in (text, json.dumps(text, ensure_ascii=False))
