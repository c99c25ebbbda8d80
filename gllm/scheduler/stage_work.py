"""What a micro-batch asks of a stage, in numbers from which its time can be told.

Owns the features of a step: token rows, query-key pairs, decodes and their context. Knows no
device: what a feature costs is a cost model's business, here or in the simulator.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.scheduler.plan import ON_DEVICE, ScheduledRow


class StageWork(NamedTuple):
    """One micro-batch's work on any stage."""

    step: int
    """Step number of its plan."""
    tokens: int
    """Token rows, prefill and decode together."""
    chunks: tuple[tuple[int, int], ...]
    """Prefill chunks: (tokens of the sequence before the chunk, tokens in it)."""
    decodes: int
    """Rows of one token."""
    decode_context: int
    """Tokens that those attend to, their own among them, over all decodes."""
    samples: int
    """Rows from which a token is drawn."""
    placeholders: bool = False
    """Some input token is still being sampled by the step before."""

    @property
    def pairs(self) -> float:
        """Query-key pairs of the chunks under the causal mask."""
        return sum(count_query_key_pairs(start, tokens) for start, tokens in self.chunks)


def count_query_key_pairs(start: int, tokens: int) -> float:
    """Query-key pairs of `tokens` new tokens after `start` earlier ones, causal mask."""
    return tokens * (start + (tokens + 1) / 2)


def compute_stage_work(step: int, rows: Iterable[ScheduledRow]) -> StageWork:
    """The work of a plan's rows. A chunk of one token costs what a decode costs, so it is one."""
    tokens = decodes = context = samples = 0
    chunks = []
    placeholders = False
    for row in rows:
        tokens += row.num_tokens
        samples += row.samples
        if row.num_tokens == 1:
            decodes += 1
            context += row.start + 1
            placeholders = placeholders or row.token_ids[-1:] == [ON_DEVICE]
        else:
            chunks.append((row.start, row.num_tokens))
    return StageWork(step, tokens, tuple(chunks), decodes, context, samples, placeholders)
