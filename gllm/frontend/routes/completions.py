"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from aiohttp import web
from msgspec import UNSET

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.engine.request_checks import check_request, encode_prompt, truncate_prompt
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer import send_answer
from gllm.frontend.choice_writer import ChoiceWriter, build_envelope
from gllm.frontend.choices import CollectedChoice
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.fields.base import JsonObject
from gllm.frontend.fields.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionFields,
    parse_prompts,
)
from gllm.frontend.fields.generation import to_sampling_params
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.logprobs import CompletionLogprobs, merge_completion_logprobs, prompt_logprobs
from gllm.frontend.request_run import PreparedRequest
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_PROMPTS
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer

COMPLETION_ID_PREFIX = "cmpl-"
"""Prefix of answer ids."""


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Generate the continuation of each prompt of a completion request."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, CompletionFields)
    context.check_model(fields.model)
    engine = context.engine
    texts, params = parse_completion(fields, context)
    with context.admit(len(texts)):
        prompts = await asyncio.to_thread(prepare_prompts, engine, texts, params, bool(fields.echo))
        token_ids = [prompt.token_ids for prompt in prompts]
        prepared = PreparedRequest(fields, token_ids, params, fields.has_output)
        choice_format = CompletionChoiceFormat(engine.tokenizer, fields, prepared, prompts)
        envelope = build_envelope(request, prepared, COMPLETION_ID_PREFIX, "text_completion")
        writer = ChoiceWriter(prepared, choice_format, envelope)
        return await send_answer(request, prepared, writer)


def parse_completion(
    fields: CompletionFields, context: ServerContext
) -> tuple[list[str] | list[list[int]], SamplingParams]:
    """Return the prompts of a completion request, not tokenized, and its SamplingParams.

    Raises:
        FieldError: A value is not allowed, or there are too many prompts or choices.
    """
    if not fields.has_output and not fields.echo:
        raise FieldError("max_tokens", "max_tokens is 0, but has to be at least 1 without echo")
    # A request without output samples one token, which is not returned.
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    max_tokens = max_tokens or (DEFAULT_MAX_TOKENS if fields.has_output else 1)
    params = to_sampling_params(fields, context, logprobs=fields.logprobs, max_tokens=max_tokens)
    num_echo_logprobs = fields.logprobs if fields.echo else None
    counts = [num for num in (num_echo_logprobs, fields.prompt_logprobs) if num is not None]
    params = replace(params, prompt_logprobs=max(counts, default=None))
    config = context.config
    texts = parse_prompts(fields.prompt, min(MAX_PROMPTS, config.max_num_queued_requests))
    max_choices = max(MAX_PROMPTS, config.max_choices)
    num_choices = len(texts) * params.n
    if num_choices > max_choices:
        message = (
            f"n is {params.n}, which is {num_choices} choices with {len(texts)} prompts, but at "
            f"most {max_choices} are allowed"
        )
        raise FieldError("n", message)
    return texts, params


@dataclass(frozen=True)
class CompletionPrompt:
    """Token ids of one prompt of a completion request, and its text if `echo` repeats it."""

    token_ids: list[int]
    echo_text: str = ""
    """Text of the prompt to return before the output; empty without `echo`."""


def prepare_prompts(
    engine: EngineInterface,
    prompts: list[str] | list[list[int]],
    params: SamplingParams,
    echo: bool,
) -> list[CompletionPrompt]:
    """Tokenize the prompts of a completion request, truncate them if requested, and check lengths.

    Args:
        engine: The engine, for model and tokenizer.
        prompts: Texts or lists of token ids.
        params: Sampling parameters, with the number of tokens to truncate prompts to.
        echo: Also return the text of each prompt.

    Raises:
        FieldError: A prompt is empty, too long or has invalid token ids.
    """
    tokenizer = engine.tokenizer
    prepared = []
    for prompt in prompts:
        if isinstance(prompt, str):
            token_ids = encode_prompt(prompt, params, engine.model, tokenizer)
        else:
            token_ids = truncate_prompt(prompt, params, engine.model)
        check_request(token_ids, params, engine.model)
        text = ""
        if echo:
            is_complete = isinstance(prompt, str) and (
                params.truncate_prompt_tokens is None
                or len(tokenizer.encode(prompt)) == len(token_ids)
            )
            text = str(prompt) if is_complete else _decode(tokenizer, token_ids, params)
        prepared.append(CompletionPrompt(token_ids, text))
    return prepared


def _decode(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> str:
    """Return the text of a prompt's token ids."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    return detokenizer.push(token_ids)[0] + detokenizer.finish()


class CompletionChoiceFormat:
    """Formats the choices of completions: text, text deltas, log-probabilities and echoed prompts.

    Args:
        tokenizer: The model's tokenizer.
        fields: The parsed request body.
        request: The prepared request.
        prompts: The prompts, in the order of the request.
    """

    chunk_type = schemas.CompletionChunk

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: CompletionFields,
        request: PreparedRequest,
        prompts: list[CompletionPrompt],
    ) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._request = request
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}
        """Log-probabilities of the choices that have started, by index."""
        self._echoed: set[int] = set()
        """Indices of the choices whose prompt has been returned."""

    @property
    def is_plain_text(self) -> bool:
        """True if the output is text without the echoed prompt and log-probabilities."""
        return not self._fields.echo and self._fields.logprobs is None

    def start_choices(self, index: int) -> list[schemas.CompletionChoice]:
        """Return no choices: a stream starts with text."""
        return []

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[schemas.CompletionChoice]:
        """Return chunk choices: the echoed prompt before the first delta, then the new text."""
        choices = []
        if self._fields.echo and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            logprobs = self._echo_logprobs(delta)
            text = self._prompt(delta.index).echo_text
            echo = schemas.CompletionChoice(delta.index, text, logprobs, None, None)
            echo.token_ids = [] if token_ids else UNSET
            choices.append(echo)
        has_output = delta.text or delta.logprobs or (token_ids and delta.token_ids)
        if has_output or delta.finish_reason is not None:
            logprobs = self._output_logprobs(delta)
            reason = cast("schemas.FinishReason | None", delta.finish_reason)
            choice = schemas.CompletionChoice(
                delta.index, delta.text, logprobs, reason, delta.stop_reason
            )
            choice.token_ids = delta.token_ids if token_ids else UNSET
            choices.append(choice)
        return choices

    def build_answer(
        self,
        envelope: JsonObject,
        choices: list[CollectedChoice],
        usage: schemas.CompletionUsage,
        token_ids: bool,
    ) -> schemas.CompletionResponse:
        """Return the completion response."""
        formatted = [self._whole_choice(choice, token_ids) for choice in choices]
        return schemas.CompletionResponse(**envelope, choices=formatted, usage=usage)

    def _whole_choice(self, choice: CollectedChoice, token_ids: bool) -> schemas.CompletionChoice:
        """Return a choice with its text."""
        text, logprobs = choice.text, None
        if self._fields.echo:
            text = self._prompt(choice.index).echo_text + text
        if self._fields.logprobs is not None:
            parts = [self._echo_logprobs(choice)] if self._fields.echo else []
            logprobs = merge_completion_logprobs(
                [part for part in (*parts, self._output_logprobs(choice)) if part]
            )
        reason = cast("schemas.FinishReason", choice.finish_reason)
        answer = schemas.CompletionChoice(choice.index, text, logprobs, reason, choice.stop_reason)
        answer.token_ids = choice.token_ids if token_ids else UNSET
        num_prompt_logprobs = self._fields.prompt_logprobs
        if num_prompt_logprobs is not None:
            entries = choice.prompt_logprobs
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, entries, num_prompt_logprobs)
        return answer

    def _prompt(self, index: int) -> CompletionPrompt:
        """Return the prompt of a choice."""
        return self._prompts[index // self._request.params.n]

    def _echo_logprobs(
        self, output: OutputDelta | CollectedChoice
    ) -> schemas.CompletionLogprobsObject | None:
        """Return the log-probabilities of the echoed prompt, if requested."""
        if self._fields.logprobs is None:
            return None
        token_ids = self._prompt(output.index).token_ids
        return self._new_logprobs(0).part(token_ids, [None, *output.prompt_logprobs])

    def _output_logprobs(
        self, output: OutputDelta | CollectedChoice
    ) -> schemas.CompletionLogprobsObject | None:
        """Return the log-probabilities of output tokens, if requested."""
        if self._fields.logprobs is None:
            return None
        if output.index not in self._logprobs:
            prompt = self._prompt(output.index)
            start = len(prompt.echo_text)
            self._logprobs[output.index] = self._new_logprobs(start, prompt.token_ids)
        return self._logprobs[output.index].part(output.token_ids, output.logprobs)

    def _new_logprobs(self, start: int, prompt: Sequence[int] = ()) -> CompletionLogprobs:
        """Return a writer of log-probabilities for text that starts at a character offset.

        prompt: tokens before that text.
        """
        return CompletionLogprobs(
            self._tokenizer,
            self._fields.logprobs or 0,
            self._request.params.skip_special_tokens,
            start,
            bool(self._fields.return_tokens_as_token_ids),
            prompt,
        )
