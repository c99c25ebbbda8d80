"""The fields of POST /v1/chat/completions.

Owns the schema and what needs no engine to be checked. Knows nothing of the answer.
"""

from typing import Annotated, Any

import msgspec

from gllm.config import MAX_LOGPROBS, FieldError
from gllm.frontend.fields.body import Int, about
from gllm.frontend.fields.generation import Generation


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatFields(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[
        Any, about("the chat so far: role and content each; content is text or parts of text")
    ] = None
    """Checked by the chat template."""
    add_generation_prompt: Annotated[
        bool | None, about("begin the assistant's answer; default true")
    ] = None
    chat_template_kwargs: Annotated[
        TemplateOptions | None, about("variables of the chat template: enable_thinking, thinking")
    ] = None
    logprobs: Annotated[bool | None, about("log-probabilities of the output's tokens")] = None
    top_logprobs: Annotated[
        Int | None, about("0..20 likeliest tokens at each place; only with logprobs")
    ] = None

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises FieldError for fields that do not go together."""
        super().check()
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise FieldError("top_logprobs", f"top_logprobs is {top}, not in 0..{MAX_LOGPROBS}")
        if top and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is only allowed with logprobs")
