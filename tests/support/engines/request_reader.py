"""A reader of a request that checks what it reads."""

from collections import Counter
from collections.abc import Sequence

from gllm.runtime.head.request_stream import RequestStream
from tests.support.engines.fake_driver import STOP, logprob_of, text_of


class RequestReader:
    """A request and all that was read of it."""

    def __init__(
        self,
        stream: RequestStream,
        prompt: list[int],
        poison_at: int | None,
        numerics: Sequence[str] = ("",),
    ) -> None:
        self.stream = stream
        entry = stream.entry
        self.possible = [
            [text_of(prompt, choice, entry.max_tokens, each) for choice in range(entry.n)]
            for each in numerics
        ]
        """Output of each choice, for each numerics that an engine has."""
        self.prompt, self.poison_at = prompt, poison_at
        self.tokens: list[list[int]] = [[] for _ in range(entry.n)]
        self.logprobs: list[list[float]] = [[] for _ in range(entry.n)]
        self.prompt_logprobs: list[int] = []
        self.embeddings: list[bytes] = []
        self.ends: dict[int, str] = {}
        self.kinds: set[str] = set()
        self.num_first: Counter[int] = Counter()
        self.aborted: set[int] = set()
        self.deaths: set[int] = set()
        """Unexplained deaths with a row in an uncommitted plan since the last new token."""
        self.was_alone = False
        """At the last of these deaths, as a suspect."""
        stream.set_listener(self.read)

    def read(self) -> None:
        for choice, delta in self.stream.pop_deltas().items():
            assert choice not in self.ends, "nothing follows an end"
            self.tokens[choice] += delta.tokens
            self.logprobs[choice] += [each.logprob for each in delta.logprobs or []]
            self.prompt_logprobs += [each.token for each in delta.prompt_logprobs or []]
            self.embeddings += [delta.embedding] * bool(delta.embedding)
            self.num_first[choice] += delta.first is not None
            if delta.end is not None:
                self.ends[choice] = delta.end.finish_reason
                self.kinds.add(delta.error_kind)

    @property
    def texts(self) -> list[list[int]]:
        """Output of each choice, by the numerics of the first token; there is one, of all tokens.

        Any of them before the first token.
        """
        fitting = self.fitting()
        assert fitting, f"{self.tokens} is not the beginning of any of {self.possible}"
        return self.possible[fitting[0]]

    def fitting(self) -> list[int]:
        """Return the indices of the numerics that give the journal's tokens."""
        outputs = self.stream.entry.outputs
        return [
            index
            for index, texts in enumerate(self.possible)
            if all(texts[choice][: len(tokens)] == tokens for choice, tokens in outputs.items())
        ]

    def check(self) -> None:
        """Check that all that was read is exact so far."""
        entry = self.stream.entry
        for choice, text in enumerate(self.texts):
            tokens = self.tokens[choice]
            assert entry.outputs[choice] == tokens
            assert self.num_first[choice] == bool(tokens)
            if entry.sampling.logprobs is not None:
                assert self.logprobs[choice] == [logprob_of(t).logprob for t in tokens]
            if self.ends.get(choice) in ("stop", "length"):
                assert tokens == text
        assert len(self.embeddings) <= 1
        assert self.prompt_logprobs in ([], self.prompt[1:])

    def check_ends(self) -> None:
        """Check that each choice has its whole output and its end, unless that was cut short."""
        assert not self.stream.alive
        for choice, text in enumerate(self.texts):
            if choice not in self.aborted and "poison" not in self.kinds:
                assert self.tokens[choice] == text
                assert self.ends[choice] == ("stop" if text[-1] == STOP else "length")
        if self.tokens[0] and self.stream.entry.sampling.embeds:
            assert self.embeddings == [b"vector"]
            assert self.prompt_logprobs == self.prompt[1:]

    def kills(self, choice: int, index: int) -> bool:
        """Return whether computing a token kills the worker."""
        return self.poison_at is not None and choice == 0 and index >= self.poison_at
