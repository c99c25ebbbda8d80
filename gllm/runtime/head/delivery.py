"""Delivery of a step's output to the streams and the journals of the requests."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gllm.messages.requests import EngineOutputs
from gllm.messages.sampling import SampleDetails
from gllm.runtime.head.request_stream import RequestStream


class SubmittedChoice(NamedTuple):
    """Receiver of a wire id's output."""

    stream: RequestStream
    choice: int
    """Index of the choice."""
    append: Callable[[int], None]
    """Adds a token to the choice's output in the journal."""


def deliver(
    message: EngineOutputs, choices: Mapping[int, SubmittedChoice]
) -> list[SubmittedChoice]:
    """Add the output of a step to streams and journals.

    Args:
        message: output of a step.
        choices: choices that run, by wire id. Other wire ids belong to choices that have ended, or
            to an earlier scheduler; their output is dropped.

    Returns:
        The choices that have ended.
    """
    outcome = message.outcome
    if message.details:
        _deliver_details(message.details, choices)
    for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
        target = choices.get(seq)
        if target is not None:
            stream, choice, append = target
            append(token)
            # A fast reader has a new delta for each token.
            delta = stream.deltas.get(choice)
            if delta is None:
                stream.start_delta(choice, [token])
            else:
                delta.tokens.append(token)
    for first in outcome.first_tokens:
        if target := choices.get(first.seq):
            started = target.stream.entry.started
            if target.choice not in started:
                started.add(target.choice)
                target.stream.delta(target.choice).first = first
    ended = []
    kinds = dict(message.error_kinds)
    for end in outcome.finished:
        if target := choices.get(end.seq):
            delta = target.stream.delta(target.choice)
            delta.end, delta.error_kind = end, kinds.get(end.seq, "")
            ended.append(target)
    return ended


def _deliver_details(details: list[SampleDetails], choices: Mapping[int, SubmittedChoice]) -> None:
    """Add values that come with a token; those of the prompt are delivered once."""
    for row in details:
        target = choices.get(row.seq)
        if target is None:
            continue
        entry, delta = target.stream.entry, target.stream.delta(target.choice)
        if row.prompt_logprobs and not entry.prompt_logprobs_sent:
            entry.prompt_logprobs_sent = True
            delta.prompt_logprobs = row.prompt_logprobs
        if row.embedding and not entry.embedding_sent:
            entry.embedding_sent = True
            delta.embedding = row.embedding
        if row.sampled is not None:
            if delta.logprobs is None:
                delta.logprobs = []
            delta.logprobs.append(row.sampled)
