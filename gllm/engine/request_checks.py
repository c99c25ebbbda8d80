"""Checks of a request against the served model, before it is sent to the engine."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import ModelInfo
from gllm.options.field_types import FieldError, to_int, to_str
from gllm.options.limits import MAX_PROMPT_LOGPROBS
from gllm.text.tokenizer import Tokenizer, TooManyTokensError


class PromptTooLongError(FieldError):
    """The prompt leaves no space for output in the model's context window."""


def truncate_prompt(prompt: list[int], params: SamplingParams, model: ModelInfo) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens of a prompt, or all if it is unset.

    Args:
        prompt: token ids.
        params: parameters of the request; -1 truncates so that `max_tokens` of output still fit.
        model: context length of the model.
    """
    num_tokens = params.truncate_prompt_tokens
    if num_tokens is None:
        return prompt
    if num_tokens == -1:
        num_tokens = max(1, model.max_model_len - (params.max_tokens or 1))
    return prompt[-num_tokens:]


def check_options(
    params: SamplingParams, priority: int, cache_salt: str, request_id: str
) -> tuple[int, str]:
    """Check priority, cache salt and id of a request; return the priority and the cache salt.

    Raises:
        FieldError: an option is invalid; the error names it.
    """
    is_sampling: object = isinstance(params, SamplingParams)
    if not is_sampling:
        type_name = type(params).__name__
        raise FieldError("params", f"params is of type {type_name}, but has to be SamplingParams")
    to_str("request_id", request_id)
    converted = to_int("priority", priority)
    if not -(2**63) <= converted < 2**63:
        raise FieldError("priority", "priority has to be a 64-bit signed integer")
    return converted, to_str("cache_salt", cache_salt)


def encode_prompt(
    text: str,
    params: SamplingParams,
    model: ModelInfo,
    tokenizer: Tokenizer,
    param: str = "prompt",
) -> list[int]:
    """Tokenize a prompt and truncate it to `truncate_prompt_tokens`; blocks for long texts.

    Args:
        text: prompt.
        params: parameters of the request.
        model: context length of the model.
        tokenizer: the model's tokenizer.
        param: name of the prompt's field, for errors.

    Raises:
        PromptTooLongError: the prompt is too long; a text that cannot fit is not tokenized.
    """
    with convert_length_errors(param, model):
        limit = None if params.truncate_prompt_tokens is not None else model.max_model_len - 1
        return truncate_prompt(tokenizer.encode(text, max_tokens=limit), params, model)


@contextmanager
def convert_length_errors(param: str, model: ModelInfo) -> Iterator[None]:
    """Raise PromptTooLongError in place of TooManyTokensError, as a context manager.

    Args:
        param: name of the prompt's field, for errors.
        model: context length of the model.
    """
    try:
        yield
    except TooManyTokensError as error:
        raise _too_long(param, error.count, model, error.is_exact) from None


def _too_long(
    param: str, count: int, model: ModelInfo, is_exact: bool = True
) -> PromptTooLongError:
    return PromptTooLongError(
        param,
        f"{param} has {'' if is_exact else 'at least '}{count} tokens, but this model's maximum "
        f"context length is {model.max_model_len} tokens, of which at least one has to be left for "
        "the output",
    )


def contradiction_error(params: SamplingParams) -> FieldError | None:
    """Return the error of a request of which a position of the output may have no token at all.

    The sampler finds that out, because it depends on the tokens before.

    Returns:
        None if no field of the request excludes single tokens: the server is to blame.
    """
    is_set = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": bool(params.min_tokens),
    }
    fields = [name for name, given in is_set.items() if given]
    if not fields:
        return None
    if params.structured is not None:
        fields.append(params.structured.param)
    elif params.stop_token_ids:
        fields.append("stop_token_ids")
    verb = "forbid" if len(fields) > 1 else "forbids"
    return FieldError(
        fields[0],
        f"{' and '.join(fields)} {verb} every token at a position of the output: permit more "
        f"tokens by {fields[0]}, or leave it out",
    )


def check_can_generate(model: ModelInfo) -> None:
    """Raise FieldError if the model embeds texts and writes none."""
    if model.is_embedding_only:
        raise FieldError(
            "model",
            f"{model.name} has bidirectional attention: it embeds texts and writes none; use "
            "/v1/embeddings",
        )


def check_request(
    prompt: Sequence[int], params: SamplingParams, model: ModelInfo, param: str = "prompt"
) -> None:
    """Check that the model can run a request: prompt length, token ids and sampling parameters.

    Args:
        prompt: token ids.
        params: parameters of the request.
        model: limits of the model.
        param: name of the prompt's field, for errors.

    Raises:
        FieldError: a field is invalid; PromptTooLongError if the prompt is too long.
    """
    if not prompt:
        raise FieldError(param, f"{param} is empty: at least one token is needed")
    if len(prompt) + 1 > model.max_model_len:
        raise _too_long(param, len(prompt), model)
    if params.prompt_logprobs is not None:
        num_logprobs = len(prompt) * (params.prompt_logprobs + 1)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise FieldError(
                "prompt_logprobs",
                f"{len(prompt)} prompt tokens with prompt_logprobs {params.prompt_logprobs} are "
                f"{num_logprobs} log-probabilities, but at most {MAX_PROMPT_LOGPROBS} are allowed",
            )
    ids_by_field: dict[str, Collection[int]] = {
        param: prompt,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias,
    }
    for name, ids in ids_by_field.items():
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
            raise FieldError(
                name, f"{name} has ids out of the vocabulary 0..{model.vocab_size - 1}"
            )
