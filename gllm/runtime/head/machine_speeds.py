"""Machines of an engine: the comparison of their workers' speeds, by what each one announces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gllm.messages.nodes import NodeFacts


@dataclass(frozen=True)
class Machine:
    """Machine with workers."""

    facts: NodeFacts
    threads: int | None = None
    """Compute threads per worker; None for an equal share of the cores."""


def may_differ_in_speed(
    stage_nodes: Sequence[str],
    degrees: Sequence[int],
    machines: Mapping[str, Machine],
    uses_gpus: bool,
) -> bool:
    """Return True if workers of different machines may have different speeds.

    Args:
        stage_nodes: name of the node of each stage.
        degrees: number of ranks of each stage.
        machines: by the name of the node; a missing one is not compared.
        uses_gpus: False if all workers compute on the CPU.
    """
    num_workers: Counter[str] = Counter()
    for node, degree in zip(stage_nodes, degrees, strict=True):
        num_workers[node] += degree
    kinds = set()
    for node, number in num_workers.items():
        if (machine := machines.get(node)) is None:
            continue
        facts = machine.facts
        devices = sorted(set(facts.devices)) if uses_gpus else []
        # Workers on GPUs do not share the cores by their number.
        threads = 0 if devices else machine.threads or facts.num_cores // number
        kinds.add((tuple(devices), facts.num_cores, threads))
    return len(kinds) > 1
