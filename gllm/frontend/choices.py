"""Accumulators of output deltas: whole choices and token counts. They write no JSON but `usage`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from gllm.engine.interface import OutputDelta
from gllm.frontend.response_schemas import (
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
)
from gllm.messages.sampling import TokenLogprobs
from gllm.text.output.reasoning import ReasoningCounter


@dataclass
class UsageCounter:
    """Token counts of one HTTP request: prompt, cached, completion and reasoning tokens.

    Updated with every output delta.
    """

    num_prompt_tokens: int
    choices_per_prompt: int
    new_reasoning_counter: Callable[[], ReasoningCounter] | None = None
    """Factory of a choice's counter of reasoning tokens; None if they are not counted."""
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_accepted_guesses: int = 0
    """Draft tokens of speculation that were right, of the choices that have ended."""
    num_rejected_guesses: int = 0
    """Draft tokens that were computed and not used."""
    reasoning_counters: dict[int, ReasoningCounter] = field(default_factory=dict)
    """Counters of reasoning tokens, by choice index."""

    def add(self, delta: OutputDelta) -> None:
        """Count the output, cached and reasoning tokens of a delta.

        Choices of one prompt share its cached tokens, so only the first choice counts them.
        """
        self.num_completion_tokens += len(delta.token_ids)
        if delta.cached_tokens and delta.index % self.choices_per_prompt == 0:
            self.num_cached_tokens += delta.cached_tokens
        self.num_accepted_guesses += delta.num_accepted_guesses
        self.num_rejected_guesses += delta.num_rejected_guesses
        if self.new_reasoning_counter is not None:
            if delta.index not in self.reasoning_counters:
                self.reasoning_counters[delta.index] = self.new_reasoning_counter()
            self.reasoning_counters[delta.index].add(delta.token_ids)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens among the completion tokens; None if they are not counted."""
        if self.new_reasoning_counter is None:
            return None
        return sum(counter.num_tokens for counter in self.reasoning_counters.values())

    def to_openai(self) -> CompletionUsage:
        """Return the `usage` object of OpenAI's completions and chat completions."""
        return CompletionUsage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
            completion_tokens_details=self._completion_details(),
        )

    def _completion_details(self) -> CompletionTokensDetails | UnsetType:
        """Return the details that are counted; unset if none is."""
        reasoning = self.num_reasoning_tokens
        has_guesses = self.num_accepted_guesses + self.num_rejected_guesses > 0
        if reasoning is None and not has_guesses:
            return UNSET
        return CompletionTokensDetails(
            reasoning_tokens=UNSET if reasoning is None else reasoning,
            accepted_prediction_tokens=self.num_accepted_guesses if has_guesses else UNSET,
            rejected_prediction_tokens=self.num_rejected_guesses if has_guesses else UNSET,
        )


@dataclass
class CollectedChoice:
    """Text, token ids and log-probabilities of one choice, accumulated from its output deltas."""

    index: int
    texts: list[str] = field(default_factory=list)
    """Text of each delta."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """Text of the choice."""
        return "".join(self.texts)

    def add(self, delta: OutputDelta) -> None:
        """Append an output delta to the choice."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def to_delta(self) -> OutputDelta:
        """Return the complete output of the choice as a single output delta."""
        return OutputDelta(
            self.index,
            self.text,
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            logprobs=self.logprobs,
        )
