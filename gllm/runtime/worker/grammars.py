"""Grammars on the last stage: threads compile them and compute masks while the pipeline runs.

A grammar that arrives here has been compiled before (gllm/text/grammar/compiler.py), so its
compilation is known to end.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.messages.sampling import SequenceSamplingParams
from gllm.text.grammar.guide import GrammarGuide, GrammarGuideError, GuideOptions, filter_eos_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 32
"""Compiled grammars that are cached."""
MAX_COMPILED_CHARACTERS = 2**19
"""Total length of the cached grammars."""
MAX_COPIES = 64
"""Sequences that get a copy of one compiled grammar: copies share the states of their lexer, which
only grow."""
NUM_MASK_THREADS = 4
"""Threads that compute masks."""
COMPILER_STACK_BYTES = 2**24
"""Stack of the compiling thread; larger than in the process that compiled the grammar first."""


class GuideFactory:
    """Creates sequences' grammar guides, which compute masks of allowed tokens on threads.

    Threads and vocabulary are created with the first guide.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_compiled: int = MAX_COMPILED,
        max_copies: int = MAX_COPIES,
    ) -> None:
        """Create a factory without threads and grammars.

        Args:
            folder: folder of the model.
            vocab_size: vocabulary size of the model.
            eos_ids: tokens that end a sequence.
            max_compiled: compiled grammars that are cached.
            max_copies: sequences that get a copy of one compiled grammar.
        """
        self._model = (folder, vocab_size, eos_ids)
        self._max_compiled, self._max_copies = max_compiled, max_copies
        self.num_compilations = 0
        """Grammars that were compiled, each time counted."""
        self._compiler: ThreadPoolExecutor | None = None
        self._mask_threads = ThreadPoolExecutor(NUM_MASK_THREADS, "grammar-masks")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        """Matchers at their start and the number of their copies, by grammar; the least recently
        used first. Only the compiling thread accesses them."""

    def create_guide(
        self, params: SequenceSamplingParams, output: Sequence[int] = ()
    ) -> GrammarGuide:
        """Return the guide of a sequence; its grammar is compiled in the background.

        Args:
            params: sampling parameters with a grammar.
            output: tokens that the sequence has generated already.
        """
        if self._compiler is None:
            self._compiler = _create_compiler_thread()
        _, vocab_size, eos_ids = self._model
        # A parameter that may ban a forced token, or returns details of each token, has to process
        # every token.
        samples_all = params.logprobs is not None or params.allowed or params.bad_words
        ends = filter_eos_ids(eos_ids, vocab_size)
        options = GuideOptions(vocab_size, ends[0] if ends else 0, not samples_all)
        return GrammarGuide(
            self._compiler.submit,
            self._mask_threads.submit,
            lambda: self._copy_matcher(params.grammar),
            options,
            output,
        )

    def close(self) -> None:
        """End the threads after the masks that they are computing; other masks are cancelled."""
        for pool in (self._compiler, self._mask_threads):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _copy_matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at its start.

        Raises:
            GrammarGuideError: the grammar does not compile.
        """
        matcher, num_copies = self._compiled.pop(grammar, (None, 0))
        if matcher is None or num_copies == self._max_copies:
            matcher, num_copies = self._compile(grammar), 0
        self._compiled[grammar] = matcher, num_copies + 1
        while (
            len(self._compiled) > self._max_compiled
            or sum(map(len, self._compiled)) > MAX_COMPILED_CHARACTERS
        ):
            self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, grammar: str) -> "LLMatcher":
        self.num_compilations += 1
        # Most workers need neither.
        from llguidance import LLMatcher

        from gllm.text.grammar.vocabulary import create_parser_limits, load_grammar_tokenizer

        if self._tokenizer is None:
            try:
                self._tokenizer = load_grammar_tokenizer(*self._model)
            except (OSError, ValueError) as error:
                raise GrammarGuideError(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, limits=create_parser_limits(), log_level=0)
        if matcher.is_error():
            raise GrammarGuideError(f"the grammar does not compile: {matcher.get_error()}")
        return matcher


def _create_compiler_thread() -> ThreadPoolExecutor:
    """Create a pool of one thread with a stack of COMPILER_STACK_BYTES."""
    previous = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, "grammar-compiler")
        # Creates the thread.
        pool.submit(lambda: None)
    finally:
        threading.stack_size(previous)
    return pool
