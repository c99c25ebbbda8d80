"""Outputs of LLM: finished choices of prompts and chats, and embeddings."""

from dataclasses import dataclass, field
from typing import Any

from gllm.messages.sampling import TokenLogprobs
from gllm.text.output.events import ToolCall


@dataclass
class CompletionOutput:
    """Generated text, tokens and finish reason of one choice of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """stop, length, abort or error; of a chat also tool_calls."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, if one did."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each token, if requested."""
    error: str = ""
    """Error that ended the choice; set if `finish_reason` is `error`."""


@dataclass
class RequestOutput:
    """Prompt with all of its finished choices, as `LLM.generate` returns it."""

    prompt: str | list[int]
    outputs: list[CompletionOutput]
    """The choices, `n` of them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if requested."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """Token ids of the prompt, truncated as the sampling parameters require."""

    @property
    def error(self) -> str:
        """Error of the first choice that failed; empty if none did."""
        return next((output.error for output in self.outputs if output.error), "")


@dataclass
class ChatCompletionOutput(CompletionOutput):
    """Finished choice of a chat: text, reasoning and tool calls, and the raw output."""

    content: str = ""
    """The answer without reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, to be appended to the messages of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass
class ChatOutput:
    """Prompt of a chat with all of its finished choices, as `LLM.chat` returns it."""

    prompt: list[int]
    """Token ids of the rendered chat."""
    outputs: list[ChatCompletionOutput]
    """The choices, `n` of them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if requested."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the rendered chat."""
        return self.prompt

    @property
    def error(self) -> str:
        """Error of the first choice that failed; empty if none did."""
        return next((output.error for output in self.outputs if output.error), "")


@dataclass
class PromptEmbedding:
    """Embedding of a prompt."""

    embedding: list[float] = field(default_factory=list)
    """`hidden_size` numbers; empty if the prompt failed."""


@dataclass
class EmbeddingRequestOutput:
    """Prompt with its embedding, as `LLM.embed` returns it."""

    prompt: str | list[int]
    prompt_token_ids: list[int]
    outputs: PromptEmbedding = field(default_factory=PromptEmbedding)
    error: str = ""
    """Error of the prompt; empty on success."""
