"""Arguments of LLM: prompts and sampling parameters in all forms that vLLM's LLM takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict, TypeVar

from gllm.config.sampling import SamplingParams
from gllm.options.field_types import FieldError, to_str, to_token_ids

T = TypeVar("T")


class TextPrompt(TypedDict, total=False):
    """Prompt as a text, with options."""

    prompt: str
    cache_salt: str
    """Prefix-cache entries are shared only by prompts with the same salt."""


class TokensPrompt(TypedDict, total=False):
    """Prompt as token ids, with options; `prompt` is only shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Prompts = Prompt | Iterable[Prompt]


@dataclass(frozen=True)
class ConvertedPrompt:
    """Prompt of one request, checked: its text or its token ids."""

    shown: str | list[int]
    """The prompt as the caller has written it."""
    token_ids: list[int] | None
    """None for a text, which is not tokenized yet."""
    cache_salt: str = ""


def convert_prompts(prompts: Prompts) -> list[ConvertedPrompt]:
    """Return each of the prompts, of which there may be one, several or an iterator.

    Raises:
        FieldError: a prompt has another form; the error names it.
    """
    if isinstance(prompts, str | Mapping):
        return [_convert(0, prompts)]
    if not isinstance(prompts, Iterable):
        raise FieldError("prompts", f"prompts is {type(prompts).__name__}: give texts or token ids")
    items: list[Any] = list(prompts)
    # Integers are one prompt, and numpy has its own.
    if items and isinstance(items[0], Integral):
        return [_convert(0, items)]
    return [_convert(index, item) for index, item in enumerate(items)]


def convert_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    defaults: Mapping[str, Any],
    num_prompts: int,
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt.

    Args:
        params: parameters of all prompts, or one for each; None for the defaults.
        defaults: the model's own sampling parameters.
        num_prompts: number of prompts.

    Raises:
        FieldError: there are more or fewer parameters than prompts.
    """
    if params is None:
        params = SamplingParams(**defaults)
    if not isinstance(params, list | tuple):
        # Anything else is refused with the request.
        shared: Any = params
        return [shared] * num_prompts
    if len(params) != num_prompts:
        raise FieldError(
            "sampling_params",
            f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one for "
            "each, or one for all",
        )
    return list(params)


def _convert(index: int, prompt: Any) -> ConvertedPrompt:
    """Return a prompt. Raises FieldError."""
    name = f"prompts[{index}]"
    if isinstance(prompt, str):
        return ConvertedPrompt(to_str(name, prompt), None)
    if prompt is None:
        raise FieldError("prompts", f"{name} is None: give a text or token ids")
    if not isinstance(prompt, Mapping):
        token_ids = to_token_ids(name, prompt)
        return ConvertedPrompt(token_ids, token_ids)
    known = {*TextPrompt.__annotations__, *TokensPrompt.__annotations__}
    options = {key: value for key, value in prompt.items() if value is not None}
    for key in options.keys() - known:
        raise FieldError(
            "prompts", f"{name}.{key} is not supported: give {', '.join(sorted(known))}"
        )
    salt = to_str(f"{name}.cache_salt", options.get("cache_salt", ""))
    text = to_str(f"{name}.prompt", options["prompt"]) if "prompt" in options else None
    if "prompt_token_ids" in options:
        token_ids = to_token_ids(f"{name}.prompt_token_ids", options["prompt_token_ids"])
        return ConvertedPrompt(token_ids if text is None else text, token_ids, salt)
    if text is None:
        raise FieldError("prompts", f"{name} has no prompt: give prompt or prompt_token_ids")
    return ConvertedPrompt(text, None, salt)
