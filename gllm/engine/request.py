"""State of a running request: converts the tokens of its choices into text deltas.

Detects stop strings, which only the text shows; the scheduler detects stop tokens and lengths.
"""

from collections.abc import Sequence
from random import Random

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import OutputDelta
from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.runtime.head.request_client import RequestClient
from gllm.runtime.head.request_stream import RequestStream, TokenDelta
from gllm.scheduler.plan import FirstToken
from gllm.text.detokenizer import NO_STOPS, IncrementalDetokenizer, StopStrings
from gllm.text.tokenizer import Tokenizer

BadWords = tuple[tuple[int, ...], ...]
"""Token sequences that must not be generated."""

NOT_FIRST = FirstToken(0, 0, 0.0)
"""Values of a delta that is not the first of its choice."""


class RequestState:
    """Handle of one running request: detokenizes its output; implements `RequestHandle`."""

    def __init__(
        self,
        client: RequestClient,
        stream: RequestStream,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
    ) -> None:
        """Create the detokenizers.

        Args:
            client: Client that runs the request.
            stream: Output of the request.
            tokenizer: Tokenizer of the model.
            params: The request's parameters.
            prompt: Token ids of the prompt.
        """
        self._client = client
        self._stream = stream
        self._params = params
        self.set_listener = stream.set_listener
        self.wait = stream.wait
        """Wait until output is pending; not to be used together with a listener."""
        stops = StopStrings(params.stop) if params.stop else NO_STOPS
        self._detokenizers = {
            choice: IncrementalDetokenizer(
                tokenizer,
                stops,
                params.skip_special_tokens,
                params.include_stop_str_in_output,
                params.shown_tokens,
                params.min_tokens,
                prompt if params.continues_prompt else (),
            )
            for choice in range(params.n)
        }
        """Detokenizers of the choices that have not finished, by choice index."""
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def is_finished(self) -> bool:
        """True if all choices have finished."""
        return not self._detokenizers

    @property
    def num_resumptions(self) -> int:
        """Number of recoveries after which the request was submitted again."""
        return self._stream.num_resumptions

    def pop_deltas(self) -> list[OutputDelta]:
        """Return the deltas since the last call."""
        deltas = []
        for choice, piece in self._stream.pop_deltas().items():
            detokenizer = self._detokenizers.get(choice)
            if detokenizer is None:
                continue
            if piece.first is not None:
                # Only the first choice has them, and no other choice starts before it.
                self._prompt_logprobs = piece.prompt_logprobs or self._prompt_logprobs
                piece.prompt_logprobs = self._prompt_logprobs
            delta = _delta(choice, piece, detokenizer, self._params)
            if delta.finish_reason is not None:
                del self._detokenizers[choice]
                self._client.abort(self._stream, [choice])
            deltas.append(delta)
        return deltas

    def close(self) -> None:
        """Release the request; unfinished choices are aborted."""
        self._client.release(self._stream)


def _delta(
    choice: int, piece: TokenDelta, detokenizer: IncrementalDetokenizer, params: SamplingParams
) -> OutputDelta:
    """Return a delta of tokens as a delta of text.

    A stop token is among the token ids, but in the text only if `include_stop_str_in_output` is
    set.
    """
    end, tokens = piece.end, piece.tokens
    if end is None and piece.first is None and not piece.logprobs:
        new_text, num_used, stop = detokenizer.push(tokens)
        if stop is None:
            return OutputDelta(choice, new_text, tokens)
        return OutputDelta(choice, new_text, tokens[:num_used], "stop", stop)
    stopped_by_token = end is not None and end.stop_token_id is not None
    hides_last = stopped_by_token and not params.include_stop_str_in_output
    new_text, num_used, stop = detokenizer.push(tokens[:-1] if hides_last else tokens)
    logprobs, error = piece.logprobs or [], ""
    reason: str | None = None
    stop_reason: int | str | None = None
    if stop is not None:
        tokens, logprobs, reason, stop_reason = tokens[:num_used], logprobs[:num_used], "stop", stop
    elif end is not None:
        new_text += detokenizer.finish()
        reason, error = end.finish_reason, end.error
        stop_reason = end.stop_token_id if end.stop_token_id in params.stop_token_ids else None
    first = piece.first or NOT_FIRST
    return OutputDelta(
        index=choice,
        text=new_text,
        token_ids=tokens,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=error,
        error_kind=piece.error_kind,
        cached_tokens=first.num_cached_tokens,
        queue_seconds=first.queue_seconds,
        logprobs=logprobs,
        prompt_logprobs=piece.prompt_logprobs or [],
        num_held_tokens=end.num_kv_tokens if end is not None and end.kv_ticket else 0,
        num_accepted_guesses=end.num_accepted_guesses if end is not None else 0,
        num_rejected_guesses=end.num_rejected_guesses if end is not None else 0,
    )


def build_sequence_params(
    params: SamplingParams, stop_ids: set[int], bad_words: BadWords, grammar: str, seeds: Random
) -> SequenceSamplingParams:
    """Convert a request's sampling parameters for the sampler; without a seed, draw a random one.

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
