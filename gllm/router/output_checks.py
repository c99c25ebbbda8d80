"""Checks of requests and of engines' output: stale tokens, requests given back, hand-offs."""

from collections.abc import Callable, Sequence

import msgspec

from gllm.messages.requests import AbortSequences, EngineOutputs
from gllm.router.dispatch_target import DispatchTarget
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence


def drop_stale(engine: DispatchTarget, message: EngineOutputs) -> int:
    """Abort sequences that an engine computes although the router has moved or ended them.

    Returns:
        The number of their tokens in the message.
    """
    stale = [seq for seq in message.outcome.seqs if seq not in engine.choices]
    if not stale:
        return 0
    running = set(stale).difference(end.seq for end in message.outcome.finished)
    if running:
        engine.send(AbortSequences(sorted(running)))
    return len(stale)


def split_refused(
    engine: DispatchTarget, message: EngineOutputs, on_poison: Callable[[JournalEntry], None]
) -> tuple[EngineOutputs, dict[RequestStream, None]]:
    """Remove the requests that an engine has returned unfinished from its output, and return both.

    Args:
        engine: sender of the message.
        message: its output.
        on_poison: called with each request that ends because its computation has killed workers.
    """
    refused: dict[RequestStream, None] = {}
    unavailable = set()
    for seq, kind in message.error_kinds:
        choice = engine.choices.get(seq)
        if choice is None:
            continue
        if kind == "unavailable":
            refused[choice.stream] = None
            unavailable.add(seq)
        elif kind == "poison":
            on_poison(choice.stream.entry)
    return without_ends(message, unavailable), refused


def without_ends(message: EngineOutputs, seqs: set[int]) -> EngineOutputs:
    """Return an engine's output without the finish records of some sequences."""
    finished = [end for end in message.outcome.finished if end.seq not in seqs]
    return msgspec.structs.replace(message, outcome=message.outcome._replace(finished=finished))


def without_tokens(message: EngineOutputs, seqs: set[int]) -> EngineOutputs:
    """Return an engine's output without the tokens and token details of some sequences."""
    outcome = message.outcome
    kept = [
        (seq, token)
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True)
        if seq not in seqs
    ]
    outcome = outcome._replace(
        seqs=[seq for seq, _ in kept],
        token_ids=[token for _, token in kept],
        first_tokens=[first for first in outcome.first_tokens if first.seq not in seqs],
    )
    details = [row for row in message.details if row.seq not in seqs]
    return msgspec.structs.replace(message, outcome=outcome, details=details)


def end_all_choices(
    message: EngineOutputs, failed: Sequence[tuple[FinishedSequence, list[int]]]
) -> EngineOutputs:
    """Return an engine's output in which the failure of a choice ends all choices of its request.

    Args:
        message: output of an engine.
        failed: failed requests, each as the finish record of one choice and the ids of all its
            choices.
    """
    kinds = dict(message.error_kinds)
    ends = list(message.outcome.finished)
    for end, seqs in failed:
        others = [seq for seq in seqs if seq != end.seq]
        ends += [end._replace(seq=seq) for seq in others]
        if end.seq in kinds:
            kinds |= dict.fromkeys(others, kinds[end.seq])
    outcome = message.outcome._replace(finished=ends)
    return msgspec.structs.replace(message, outcome=outcome, error_kinds=list(kinds.items()))


def can_be_handed_off(entry: JournalEntry) -> bool:
    """Return True if a request can be prefilled on one engine and decoded on another.

    It must generate more than one token, have no output yet, and request neither prompt logprobs
    nor embeddings. With several choices the prompt needs two tokens, because the choices are
    sampled from its last token, which the decode engine computes.
    """
    return (
        (entry.n == 1 or len(entry.prompt) > 1)
        and entry.max_tokens > 1
        and not entry.num_output_tokens
        and entry.sampling.prompt_logprobs is None
        and not entry.sampling.embeds
    )
