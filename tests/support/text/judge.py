"""Says whether a grammar takes a text, by the library that enforces grammars."""

import json

from llguidance import LLMatcher, LLTokenizer

from gllm.text.tokenizer import Tokenizer


class Judge:
    """A grammar in Lark over a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, source: str, eos_token: int | None = 0) -> None:
        self._tokenizer = tokenizer
        self._tokens = LLTokenizer(tokenizer._backend.to_str(), eos_token=eos_token)
        self._grammar = json.dumps({"grammars": [{"lark_grammar": source}]})

    def takes(self, text: str) -> bool:
        """Whether all of a text, and no more, is an output."""
        matcher = LLMatcher(self._tokens, self._grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self._tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
