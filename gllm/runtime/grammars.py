"""The last stage's grammars: compiled beside the pipeline, and walked through beside it.

Owns the threads that do it and a bounded memory of what is compiled. Knows nothing of rows and
logits. What comes here has been compiled before (gllm/grammar/compiler.py), so it is known to end.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.grammar.guide import GrammarGuide, GrammarGuideError, GuideOptions, valid_eos_ids
from gllm.messages.sampling import SequenceSamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 32
MAX_CHARACTERS = 2**19
"""Of all grammars that are kept."""
MAX_USES = 64
"""Sequences that get a copy of one compiled grammar: copies share what their lexer learns, which
only grows."""
WALKERS = 4
"""Threads that compute masks."""
STACK = 2**24
"""Bytes of the compiling thread's stack."""


class Grammars:
    """Guides for sequences of one model. Threads and vocabulary are made when first needed."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._model = (folder, vocab_size, eos_ids)
        self._compiler: ThreadPoolExecutor | None = None
        self._walkers = ThreadPoolExecutor(WALKERS, "grammar-walker")
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        """Matchers at their beginning and how often each was copied, the one used longest ago
        first. Only the compiling thread looks at them."""

    def guide(self, spec: SequenceSamplingParams) -> GrammarGuide:
        """The guide of one sequence; what it needs is made meanwhile."""
        if self._compiler is None:
            self._compiler = _one_thread()
        _, vocab_size, eos_ids = self._model
        # What may forbid a token that a grammar forces, or tells about each, has to see each.
        sees_all = spec.logprobs is not None or spec.allowed or spec.bad_words
        ends = valid_eos_ids(eos_ids, vocab_size)
        rules = GuideOptions(vocab_size, ends[0] if ends else 0, not sees_all)
        return GrammarGuide(
            self._compiler.submit, self._walkers.submit, lambda: self._copy(spec.grammar), rules
        )

    def _copy(self, grammar: str) -> "LLMatcher":
        """A matcher at its beginning. Raises GuideError."""
        matcher, uses = self._compiled.pop(grammar, (None, 0))
        if matcher is None or uses == MAX_USES:
            matcher, uses = self._compile(grammar), 0
        self._compiled[grammar] = matcher, uses + 1
        while len(self._compiled) > MAX_COMPILED or sum(map(len, self._compiled)) > MAX_CHARACTERS:
            self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, grammar: str) -> "LLMatcher":
        # Most workers never need it.
        from llguidance import LLMatcher

        from gllm.grammar.vocabulary import load_grammar_tokenizer, parser_limits

        if self._tokens is None:
            try:
                self._tokens = load_grammar_tokenizer(*self._model)
            except (OSError, ValueError) as error:
                raise GrammarGuideError(str(error)) from error
        matcher = LLMatcher(self._tokens, grammar, limits=parser_limits(), log_level=0)
        if matcher.is_error():
            raise GrammarGuideError(f"the grammar does not compile: {matcher.get_error()}")
        return matcher


def _one_thread() -> ThreadPoolExecutor:
    """A thread with a stack larger than the one that a grammar has compiled on before."""
    before = threading.stack_size(STACK)
    try:
        made = ThreadPoolExecutor(1, "grammar-compiler")
        made.submit(lambda: None)
    finally:
        threading.stack_size(before)
    return made
