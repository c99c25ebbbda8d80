"""Log-probabilities in the JSON of completions, chat completions and prompts."""

from collections.abc import Sequence
from itertools import chain

import msgspec

from gllm.frontend.response_schemas import (
    ChatLogprobs,
    CompletionLogprobsObject,
    PromptLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)
from gllm.messages.sampling import TokenLogprobs
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token as it is written in log-probabilities.

    A token that is not valid UTF-8 is written as `bytes:` and its bytes in hexadecimal, so that
    different tokens have different texts.
    """
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return a token's text for log-probabilities, or `token_id:ID` if `as_id` is True, as vLLM."""
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int, as_ids: bool = False
) -> ChatLogprobs:
    """Return the `logprobs` object of a chat message or of its delta.

    Args:
        tokenizer: The model's tokenizer.
        entries: Log-probabilities at each output token.
        top: Number of most likely tokens to include per position.
        as_ids: Write tokens as `token_id:ID`.
    """

    def to_logprob(token_id: int, logprob: float) -> TopLogprob:
        name = token_name(tokenizer, token_id, as_ids)
        return TopLogprob(name, logprob, list(tokenizer.token_bytes(token_id)))

    content = []
    for entry in entries:
        ranked = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
        sampled = to_logprob(entry.token, entry.logprob)
        likeliest = [to_logprob(*pair) for pair in ranked]
        content.append(TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, likeliest))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int
) -> PromptLogprobs:
    """Return `prompt_logprobs`: per prompt position an object of likely tokens by token id.

    The entry of the first prompt token is null, because nothing precedes it.

    Args:
        tokenizer: The model's tokenizer.
        entries: Log-probabilities at each prompt token after the first.
        top: Number of most likely tokens to include per position.
    """
    positions: PromptLogprobs = [None]
    for entry in entries:
        ranked = [(entry.token, entry.logprob, entry.rank)]
        columns = (entry.top_ids[:top], entry.top_logprobs[:top], range(1, top + 1))
        ranked += [row for row in zip(*columns, strict=False) if row[0] != entry.token]
        position = {}
        for token_id, logprob, rank in ranked:
            text = token_text(tokenizer, token_id)
            position[str(token_id)] = PromptTokenLogprob(logprob, rank, text)
        positions.append(position)
    return positions


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion, which a stream sends chunk by chunk.

    Args:
        tokenizer: The model's tokenizer.
        top: Number of most likely tokens to include per position.
        skip_special_tokens: Special tokens do not count for the text offsets.
        start: Text offset of the first token, in characters.
        as_ids: Write tokens as `token_id:ID`.
        prompt: Tokens before the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        top: int,
        skip_special_tokens: bool,
        start: int = 0,
        as_ids: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt
        )
        self._length = start

    def part(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobsObject:
        """Return the `logprobs` object of the next tokens.

        Args:
            token_ids: The next tokens of the completion.
            entries: Their log-probabilities; None where they are unknown.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._decoder.push([token_id])[0])
        return CompletionLogprobsObject(
            tokens=[self._name(token_id) for token_id in token_ids],
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            top_logprobs=[None if entry is None else self._likeliest(entry) for entry in entries],
            text_offset=offsets,
        )

    def _likeliest(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the actual one."""
        ids = [*entry.top_ids[: self._top], entry.token]
        logprobs = [*entry.top_logprobs[: self._top], entry.logprob]
        return {self._name(i): p for i, p in zip(ids, logprobs, strict=True)}

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer, token_id, self._as_ids)


def merge_completion_logprobs(
    parts: Sequence[CompletionLogprobsObject],
) -> CompletionLogprobsObject:
    """Concatenate the `logprobs` objects of consecutive chunks of one completion.

    Args:
        parts: The objects in order; at least one.
    """
    columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
    return CompletionLogprobsObject(*(list(chain(*column)) for column in columns))
