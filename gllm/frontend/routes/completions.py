"""POST /v1/completions.

Owns the endpoint's shape, the prompt's echo in it. Knows nothing of how answers are streamed.
"""

import asyncio
from dataclasses import dataclass, replace

from aiohttp import web

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_PROMPTS
from gllm.config.sampling import SamplingParams
from gllm.engine.interface import (
    EngineInterface,
    OutputDelta,
    check_request,
    encode_prompt,
    truncate_prompt,
)
from gllm.frontend.answer import JsonObject, send_answer
from gllm.frontend.choice_writer import ChoiceWriter
from gllm.frontend.choices import CollectedChoice
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.fields.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionFields,
    parse_prompts,
)
from gllm.frontend.fields.generation import to_sampling_params
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.logprobs import CompletionLogprobs, merge_completion_logprobs, prompt_logprobs
from gllm.frontend.request_run import PreparedRequest
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer


async def create_completion(request: web.Request) -> web.StreamResponse:
    """What follows the prompts."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, CompletionFields)
    context.check_model(fields.model)
    config, engine = context.config, context.engine
    params = _params(fields, context)
    texts = parse_prompts(fields.prompt, min(MAX_PROMPTS, config.max_num_queued_requests))
    most = max(MAX_PROMPTS, config.max_choices)
    if len(texts) * params.n > most:
        raise FieldError("n", f"{len(texts)} prompts with n {params.n} are more than {most}")
    with context.admit(len(texts)):
        prompts = await asyncio.to_thread(_prompts, engine, texts, params, bool(fields.echo))
        shape = CompletionChoiceFormat(engine.tokenizer, fields, params, prompts)
        ids = [prompt.ids for prompt in prompts]
        job = PreparedRequest(fields, ids, params, fields.has_output)
        return await send_answer(request, context, job, ChoiceWriter(request, job, shape))


def _params(fields: CompletionFields, context: ServerContext) -> SamplingParams:
    """How to sample. A request for the echo alone draws a token, which is not shown."""
    if not fields.has_output and not fields.echo:
        raise FieldError("max_tokens", "max_tokens is 0, which is only allowed with echo")
    limit = fields.max_completion_tokens or fields.max_tokens
    limit = limit or (DEFAULT_MAX_TOKENS if fields.has_output else 1)
    echoed = fields.logprobs if fields.echo else None
    asked = [count for count in (echoed, fields.prompt_logprobs) if count is not None]
    defaults, max_choices = context.engine.model.defaults, context.config.max_choices
    params = to_sampling_params(
        fields,
        defaults,
        max_choices,
        max_tokens=limit,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )
    return replace(params, prompt_logprobs=max(asked, default=None))


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it and as an echo shows it."""

    ids: list[int]
    text: str = ""
    """Empty where there is no echo."""


def _prompts(
    engine: EngineInterface,
    prompts: list[str] | list[list[int]],
    params: SamplingParams,
    echo: bool,
) -> list[Prompt]:
    """Prompts that may be given as text or as token ids."""
    tokenizer = engine.tokenizer
    made = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = encode_prompt(prompt, params, engine.model, tokenizer)
        else:
            ids = truncate_prompt(prompt, params, engine.model)
        check_request(ids, params, engine.model)
        if not echo:
            made.append(Prompt(ids))
        elif isinstance(prompt, str) and _is_whole(tokenizer, prompt, ids, params):
            made.append(Prompt(ids, prompt))
        else:
            made.append(Prompt(ids, _text(tokenizer, ids, params)))
    return made


def _is_whole(tokenizer: Tokenizer, text: str, ids: list[int], params: SamplingParams) -> bool:
    """Whether nothing of a prompt was cut off."""
    return params.truncate_prompt_tokens is None or len(tokenizer.encode(text)) == len(ids)


def _text(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> str:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    return stream.push(ids)[0] + stream.finish()


class CompletionChoiceFormat:
    """Choices as text and its increments, behind the prompt where it is echoed."""

    prefix = "cmpl-"
    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: CompletionFields,
        params: SamplingParams,
        prompts: list[Prompt],
    ) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._params = params
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}
        """Of choices that have begun."""
        self._echoed: set[int] = set()

    @property
    def is_plain_text(self) -> bool:
        """As of Shape."""
        return not self._fields.echo and self._fields.logprobs is None

    def start_choices(self, index: int) -> list[JsonObject]:
        """Nothing comes before the text."""
        return []

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[JsonObject]:
        """The echo with a choice's first delta; text and end together."""
        pieces = []
        if self._fields.echo and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            logprobs = self._prompt_logprobs(delta)
            echo = _choice(delta.index, self._prompt(delta.index).text, logprobs, None, None)
            pieces.append({**echo, **({"token_ids": []} if token_ids else {})})
        ids = {"token_ids": delta.token_ids} if token_ids else {}
        shown = delta.text or delta.logprobs or ids.get("token_ids")
        if shown or delta.finish_reason is not None:
            logprobs = self._output_logprobs(delta)
            ending = (delta.finish_reason, delta.stop_reason)
            pieces.append({**_choice(delta.index, delta.text, logprobs, *ending), **ids})
        return pieces

    def whole_choice(self, choice: CollectedChoice) -> JsonObject:
        """A text."""
        text, logprobs = choice.text, None
        if self._fields.echo:
            text = self._prompt(choice.index).text + text
        if self._fields.logprobs is not None:
            parts = [self._prompt_logprobs(choice)] if self._fields.echo else []
            logprobs = merge_completion_logprobs(
                [part for part in (*parts, self._output_logprobs(choice)) if part]
            )
        made = _choice(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)
        top = self._fields.prompt_logprobs
        if top is None:
            return made
        told = prompt_logprobs(self._tokenizer, choice.prompt_logprobs, top)
        return {**made, "prompt_logprobs": told}

    def extra_fields(self, choices: list[CollectedChoice]) -> JsonObject:
        """Nothing."""
        return {}

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[index // self._params.n]

    def _prompt_logprobs(self, part: OutputDelta | CollectedChoice) -> JsonObject | None:
        """Of the echoed prompt, where asked for."""
        if (top := self._fields.logprobs) is None:
            return None
        ids = self._prompt(part.index).ids
        skips = self._params.skip_special_tokens
        as_ids = bool(self._fields.return_tokens_as_token_ids)
        return CompletionLogprobs(self._tokenizer, top, skips, as_ids=as_ids).part(
            ids, [None, *part.prompt_logprobs]
        )

    def _output_logprobs(self, part: OutputDelta | CollectedChoice) -> JsonObject | None:
        """Of a choice's next tokens, where asked for."""
        if (top := self._fields.logprobs) is None:
            return None
        if part.index not in self._logprobs:
            begin = len(self._prompt(part.index).text)
            skips = self._params.skip_special_tokens
            as_ids = bool(self._fields.return_tokens_as_token_ids)
            made = CompletionLogprobs(self._tokenizer, top, skips, begin, as_ids)
            self._logprobs[part.index] = made
        return self._logprobs[part.index].part(part.token_ids, part.logprobs)


def _choice(
    index: int, text: str, logprobs: JsonObject | None, reason: str | None, stop: int | str | None
) -> JsonObject:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop,
    }
