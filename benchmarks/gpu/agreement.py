"""Teacher-forced agreement with transformers: logits at every position of one text.

The reference is transformers in float32, with its bfloat16 weights widened. The *noise* is the
largest difference of transformers in bfloat16 from the reference, over all positions and tokens:
the error that this type causes in an implementation that is assumed correct. Two conditions must
hold:

- gllm's largest difference from the reference is at most ERRORS times the noise;
- gllm's most likely token is the reference's wherever the reference's two largest logits differ by
  more than MARGIN times the noise. The other positions are excluded and counted.

The margin depends on the noise, not on gllm's own error: within four times the latter the second
condition could not fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import models
from benchmarks.gpu.models import Executor
from benchmarks.gpu.peers import Peer
from benchmarks.gpu.rows import Measured, SkipRowError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.scheduler.plan import ScheduledRow, StepPlan

ERRORS, MARGIN = 2.0, 4.0
INCLUDED = 0.99
"""Minimum share of positions that are not excluded."""
WAYS = ("one step", "four chunks", "decodes behind a chunk")
DECODES = 64
"""Number of positions that are decoded one by one."""


@dataclass
class Truth:
    """Reference logits of transformers for a text."""

    prompt: list[int]
    logits: Tensor
    """Shape [positions, vocabulary], float32, computed in float32."""
    noise: float


def truth_of(peer: Peer, weights: dict[str, Tensor], positions: int) -> Truth:
    """Mark rows of the LM head for a random text (models.mark) and compute its reference logits.

    Raises:
        SkipRowError: float32 weights do not fit.
    """
    place = peer.place
    place.seed("agreement")
    vocabulary = len(weights["lm_head.weight"])
    prompt = torch.randint(0, vocabulary, (positions,)).tolist()
    tokens = torch.randperm(vocabulary)[:positions].tolist()
    models.mark(weights, peer.hidden(prompt), tokens)
    low = peer.logits(prompt)
    needed = 2 * sum(each.nbytes for each in weights.values()) + 4 * low.nbytes
    if needed > place.free_bytes():
        raise SkipRowError(f"float32 weights need {needed / 2**30:.0f} GiB more")
    wide = {name: each.to(torch.float32) for name, each in weights.items()}
    exact = Peer(place, peer.folder, wide, torch.float32).logits(prompt)
    return Truth(prompt, exact, float((low - exact).abs().max()))


def chunks_of(way: str, positions: int) -> list[int]:
    """Return the tokens of each step."""
    if way == WAYS[0]:
        return [positions]
    if way == WAYS[1]:
        quarter = positions // 4
        return [quarter, quarter, quarter, positions - 3 * quarter]
    decodes = min(DECODES, positions // 2)
    return [positions - decodes] + [1] * decodes


def measure(executor: Executor, truth: Truth, way: str, seq: int) -> Measured:
    """Compare gllm's logits with the reference; no other step may be in flight.

    Args:
        executor: The model's executor.
        truth: The reference.
        way: One of WAYS.
        seq: Number of a new sequence.
    """
    return compare(logits_of(executor, truth.prompt, chunks_of(way, len(truth.prompt)), seq), truth)


def logits_of(executor: Executor, prompt: list[int], counts: Sequence[int], seq: int) -> Tensor:
    """Return the logits of a prompt, computed in steps of these numbers of tokens.

    The prompt uses the first blocks of the cache, which no sequence holds.

    Returns:
        Shape [tokens, vocabulary], float32.
    """
    executor.register(
        RegisterSequences(seq, len(prompt), prompt, SequenceSamplingParams(temperature=0.0))
    )
    blocks = list(range(-(-len(prompt) // models.BLOCK_SIZE)))
    logits, start = [], 0
    for step, count in enumerate(counts):
        row = ScheduledRow(seq, 0, start, count, blocks if not step else [], [], False)
        logits.append(executor.all_logits(executor.prepare(StepPlan(step, [row], []))))
        start += count
    return torch.cat(logits)


def compare(logits: Tensor, truth: Truth) -> Measured:
    """Check both conditions.

    Args:
        logits: Shape [positions, vocabulary], float32.
        truth: The reference.
    """
    reference = truth.logits
    error = float((logits - reference).abs().max())
    top = reference.topk(2, dim=-1)
    clear = top.values[:, 0] - top.values[:, 1] > MARGIN * truth.noise
    differs = logits.argmax(dim=-1) != top.indices[:, 0]
    mismatched, excluded = int((clear & differs).sum()), int((~clear).sum())
    figures = {
        "positions": len(reference),
        "excluded": excluded,
        "included": 1 - excluded / len(reference),
        "mismatched": mismatched,
        "error": error,
        "tolerance": ERRORS * truth.noise,
        "noise": truth.noise,
    }
    faults = []
    if mismatched:
        faults.append(f"{mismatched} of {len(reference)} likeliest tokens differ")
    if not error <= ERRORS * truth.noise:
        faults.append(f"error {error:.3g} is above {ERRORS:g} x {truth.noise:.3g}")
    return Measured(figures, {"included": INCLUDED}, fault="; ".join(faults))
