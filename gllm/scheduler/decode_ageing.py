"""Decode ageing: decodes that prompts displace from micro-batches, each a limited number of times.

Source: "Splitwise: Efficient Generative LLM Inference Using Phase Splitting" (ISCA'24, arXiv
2311.18677), machine-level scheduling of mixed machines: prompts run first, and the priority of a
preempted decode increases with its age. Its simulator sets the limit and the order.
"""

from collections.abc import Iterable

from gllm.scheduler.sequence import Sequence

MAX_PREEMPTIONS = 4
"""Preemptions of a request after which prompts displace it no more."""


def split_by_age(decodes: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the decodes that run before the prompts of a micro-batch, and those after them.

    A decode runs before the prompts once it has been preempted MAX_PREEMPTIONS times: displaced, or
    deprived of its blocks. The others are ordered: displaced ones, running ones, new ones; within
    each kind they keep their order.

    Args:
        decodes: decodes that can run.
    """
    aged: list[Sequence] = []
    others: list[Sequence] = []
    for sequence in decodes:
        is_aged = sequence.num_displacements + sequence.epoch >= MAX_PREEMPTIONS
        (aged if is_aged else others).append(sequence)
    others.sort(key=_place)
    return aged, others


def _place(sequence: Sequence) -> int:
    if sequence.num_displacements:
        return 0
    return 1 if sequence.num_scheduled_tokens > sequence.num_prefill_tokens else 2
