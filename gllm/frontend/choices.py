"""What deltas add up to: whole choices, and token counts.

Owns what is told of a request's output as a whole. Knows nothing of JSON and of sockets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gllm.engine.interface import OutputDelta
from gllm.messages.sampling import TokenLogprobs
from gllm.text.output.reasoning import ReasoningTokenCounter


@dataclass
class UsageCounter:
    """Token counts of a request."""

    prompt_tokens: int
    n: int
    new_counter: Callable[[], ReasoningTokenCounter] | None = None
    """Makes what counts a choice's tokens of reasoning; None where they are not told."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    counters: dict[int, ReasoningTokenCounter] = field(default_factory=dict)
    """By choice."""

    def add(self, delta: OutputDelta) -> None:
        """Count a delta. The choices of a prompt share it: the first one speaks for all."""
        self.completion_tokens += len(delta.token_ids)
        if delta.cached_tokens and delta.index % self.n == 0:
            self.cached_tokens += delta.cached_tokens
        if self.new_counter is not None:
            if delta.index not in self.counters:
                self.counters[delta.index] = self.new_counter()
            self.counters[delta.index].add(delta.token_ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning among those of completions, None where that is not known."""
        if self.new_counter is None:
            return None
        return sum(counter.num_tokens for counter in self.counters.values())

    def usage(self) -> dict[str, Any]:
        """The `usage` object."""
        reasoning = self.reasoning_tokens
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if reasoning is None else details),
        }


@dataclass
class CollectedChoice:
    """All of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: OutputDelta) -> None:
        """Append a delta."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def as_delta(self) -> OutputDelta:
        """The choice as the only delta of its own."""
        ending = (self.finish_reason, self.stop_reason)
        return OutputDelta(self.index, self.text, self.token_ids, *ending, logprobs=self.logprobs)
