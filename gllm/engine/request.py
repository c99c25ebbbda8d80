"""One request in the engine: its tokens as text.

Owns where the output of each choice ends, and what the last stage has to know of a request. Knows
nothing of how tokens come and of who shows the text.
"""

from collections.abc import Callable
from random import Random

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import OutputDelta
from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.runtime.client import EngineClient, RequestStream, TokenDelta
from gllm.scheduler.plan import FirstToken
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.stop_strings import StopStrings
from gllm.text.tokenizer import Tokenizer

BadWords = tuple[tuple[int, ...], ...]
"""Bad words as token sequences."""

NOT_FIRST = FirstToken(0, 0, 0.0)
"""Of a piece that does not begin its choice."""


class RequestState:
    """A request that the driver has got, as of RequestHandle."""

    def __init__(
        self,
        client: EngineClient,
        stream: RequestStream,
        tokenizer: Tokenizer,
        params: SamplingParams,
    ) -> None:
        self._client = client
        self._stream = stream
        self._params = params
        stops = StopStrings(params.stop)
        self._texts = {i: _text_stream(tokenizer, params, stops) for i in range(params.n)}
        """Of the choices that have not ended."""
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return not self._texts

    def set_listener(self, listener: Callable[[], None]) -> None:
        """As of RequestHandle."""
        self._stream.listen(listener)

    async def wait(self) -> None:
        """Until something has come, for who does not listen."""
        await self._stream.wait()

    def pop_deltas(self) -> list[OutputDelta]:
        """As of RequestHandle."""
        deltas = []
        for choice, piece in self._stream.take().items():
            text = self._texts.get(choice)
            if text is None:
                continue
            if piece.first is not None:
                # The first choice speaks for all: no other one begins before it.
                self._prompt_logprobs = piece.prompt_logprobs or self._prompt_logprobs
                piece.prompt_logprobs = self._prompt_logprobs
            delta = _delta(choice, piece, text, self._params)
            if delta.finish_reason is not None:
                del self._texts[choice]
                self._client.abort([self._stream.seq + choice])
            deltas.append(delta)
        return deltas

    def close(self) -> None:
        """As of RequestHandle."""
        self._client.release(self._stream)


def _text_stream(
    tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        stops,
        params.skip_special_tokens,
        params.include_stop_str_in_output,
        params.shown_tokens,
    )


def _delta(
    choice: int, piece: TokenDelta, text: IncrementalDetokenizer, params: SamplingParams
) -> OutputDelta:
    """A piece as text. A token that ends the choice is counted, but is no part of the text unless
    the request asks for what stopped it."""
    end, tokens = piece.end, piece.tokens
    if end is None and piece.first is None and not piece.logprobs:
        shown, used, stop = text.push(tokens)
        if stop is None:
            return OutputDelta(choice, shown, tokens)
        return OutputDelta(choice, shown, tokens[:used], "stop", stop)
    stopped_by_token = end is not None and end.stop_token_id is not None
    hides_last = stopped_by_token and not params.include_stop_str_in_output
    shown, used, stop = text.push(tokens[:-1] if hides_last else tokens)
    logprobs, error = piece.logprobs, ""
    reason: str | None = None
    why: int | str | None = None
    if stop is not None:
        tokens, logprobs, reason, why = tokens[:used], logprobs[:used], "stop", stop
    elif end is not None:
        shown += text.finish()
        reason, error = end.finish_reason, end.error
        why = end.stop_token_id if end.stop_token_id in params.stop_token_ids else None
    first = piece.first or NOT_FIRST
    known = first.num_cached_tokens, first.queue_seconds, logprobs, piece.prompt_logprobs
    return OutputDelta(choice, shown, tokens, reason, why, error, *known)


def build_sequence_params(
    params: SamplingParams, stop_ids: set[int], bad_words: BadWords, grammar: str, seeds: Random
) -> SequenceSamplingParams:
    """Return what the last stage has to know to sample; a request without a seed gets one.

    Args:
        params: The request's parameters.
        stop_ids: Token ids that end the output.
        bad_words: Token ids of the words that must not appear.
        grammar: The compiled grammar, or an empty string.
        seeds: Source of seeds.
    """
    return SequenceSamplingParams(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seeds.getrandbits(63) if params.seed is None else params.seed,
        min_tokens=params.min_tokens,
        banned=tuple(sorted(stop_ids)) if params.min_tokens else (),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=bad_words,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=grammar,
    )
