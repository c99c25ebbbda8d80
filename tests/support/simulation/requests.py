"""Requests of a simulated life, and what their readers get."""

from dataclasses import dataclass, field
from random import Random

from gllm.runtime.head.request_stream import RequestStream
from tests.support.simulation.model import VOCAB_SIZE, generate, next_tokens
from tests.support.simulation.world import BOMB_TOKEN, MAX_MODEL_LEN, POISON_TOKEN


@dataclass
class DrawnRequest:
    """A random request."""

    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    n: int
    priority: int


def draw_request(rng: Random, first_token: int | None = None) -> DrawnRequest:
    """Draw a request.

    Args:
        rng: source of the request.
        first_token: of the prompt; None for any.
    """
    # Few prompts, so that prefixes are shared.
    prompt = [rng.randrange(3) for _ in range(rng.randint(1, 3))]
    prompt += [rng.randrange(10) for _ in range(rng.choice([0, 3, 20, 40]))]
    if first_token is not None:
        prompt[0] = first_token
    max_tokens = rng.randint(1, MAX_MODEL_LEN - len(prompt))
    stop_ids = rng.sample(range(VOCAB_SIZE), 30) if rng.random() < 0.5 else []
    return DrawnRequest(
        prompt, max_tokens, stop_ids, rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 1])
    )


@dataclass
class Reader:
    """A request and what its reader has got."""

    stream: RequestStream
    request: DrawnRequest
    tokens: list[list[int]] = field(init=False)
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By choice, the finish reason and the kind of error."""
    num_firsts: list[int] = field(init=False)
    is_aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.n)]
        self.num_firsts = [0] * self.request.n

    @property
    def is_poison(self) -> bool:
        """True if the request kills the stage, or the machine, that computes it."""
        return self.request.prompt[0] in (POISON_TOKEN, BOMB_TOKEN)

    @property
    def is_done(self) -> bool:
        return len(self.ends) == self.request.n

    @property
    def errors(self) -> set[str]:
        """Kinds of the errors that choices ended with."""
        return {kind for end, kind in self.ends.values() if end == "error"}

    def read(self) -> None:
        for choice, delta in self.stream.pop_deltas().items():
            assert choice not in self.ends, "output after the end"
            self.tokens[choice] += delta.tokens
            self.num_firsts[choice] += delta.first is not None
            if delta.end is not None:
                self.ends[choice] = (delta.end.finish_reason, delta.error_kind)

    def is_output_of(self, num_stages: int) -> bool:
        """Return True if all that was read comes from engines with this number of stages."""
        for choice, got in enumerate(self.tokens):
            tokens, reason = self._expected(choice, num_stages)
            end, _ = self.ends.get(choice, ("", ""))
            if got != tokens[: len(got)] or (end in ("stop", "length") and got != tokens):
                return False
            if end in ("stop", "length") and end != reason:
                return False
        return True

    def is_mixed(self, num_stages: tuple[int, ...]) -> bool:
        """Return True if each token follows those before it by one of the kinds of engines."""
        for choice, got in enumerate(self.tokens):
            follow = [next_tokens(self.request.prompt, choice, got, each) for each in num_stages]
            if any(token not in each for token, *each in zip(got, *follow, strict=True)):
                return False
            end, _ = self.ends.get(choice, ("", ""))
            if end == "length" and len(got) != self.request.max_tokens:
                return False
            if end == "stop" and got[-1] not in self.request.stop_ids:
                return False
        return True

    def check(
        self, num_stages: tuple[int, ...], is_cut_short: bool = False, can_end: bool = False
    ) -> None:
        """Check that the output is that of one of the kinds of engines, and complete.

        Args:
            num_stages: stages of each kind of engine.
            is_cut_short: nobody waited for the ends.
            can_end: a poison request may have found an engine that it does not kill.
        """
        is_exact = any(self.is_output_of(count) for count in num_stages)
        assert is_exact or self.is_mixed(num_stages), f"{self.tokens}, {self.ends}, {self.request}"
        for choice, got in enumerate(self.tokens):
            assert is_cut_short or choice in self.ends, f"a choice without an end: {self.request}"
            assert self.num_firsts[choice] == bool(got)
            end, _ = self.ends.get(choice, ("", ""))
            assert end != "abort" or self.is_aborted
            assert end not in ("stop", "length") or not self.is_poison or can_end

    def _expected(self, choice: int, num_stages: int) -> tuple[list[int], str]:
        request = self.request
        return generate(request.prompt, choice, request.max_tokens, request.stop_ids, num_stages)
