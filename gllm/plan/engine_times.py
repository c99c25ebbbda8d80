"""Times of micro-batches on an engine by its cost model: the ground of every closed form of a rate.

The closed forms differ where their sources do. `engine_bounds` mixes prefills and decodes, and
bounds the rate of any schedule. `goodput.phase_bounds` is DistServe's: a queue of prompts, and a
batch of decodes, on engines of their own. `scale.worker_type` is Aladdin's rate per GPU, which
counts the limit in place of the step's time. `pools.clusters` is Splitwise's, with full batches of
prompts. `hetero.costs` has Table 1 of HexGen-2 besides, which knows peak rates and mean lengths.
"""

from collections.abc import Sequence
from itertools import count

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel
from gllm.sim.monotone_search import bisect_last

_steps = count(1)


def make_work(
    num_decodes: int, context: int, chunks: Sequence[tuple[int, int]], num_sampled: int
) -> StageWork:
    """Return the description of a micro-batch with prefill chunks and decodes, for a cost model.

    Each call uses a new step number, because cost models cache their results by step number.

    Args:
        num_decodes: Number of sequences that decode one token.
        context: Sum of the context lengths of these sequences, in tokens.
        chunks: (tokens already in the KV cache, new tokens) of each prefill chunk.
        num_sampled: Number of sequences for which a token is sampled.
    """
    num_tokens = num_decodes + sum(tokens for _, tokens in chunks)
    return StageWork(next(_steps), num_tokens, tuple(chunks), num_decodes, context, num_sampled)


def prefill_work(prompts: Sequence[int]) -> StageWork:
    """Return the description of a micro-batch that prefills whole prompts.

    Args:
        prompts: Length of each prompt in tokens.
    """
    return make_work(0, 0, [(0, tokens) for tokens in prompts], len(prompts))


def decode_step_work(batch_size: int, mean_context: float) -> StageWork:
    """Return the description of a micro-batch in which a batch of requests decodes one token each.

    Args:
        batch_size: Number of requests.
        mean_context: Mean context length per request in tokens.
    """
    return make_work(batch_size, round(batch_size * mean_context), (), batch_size)


class EngineTimes:
    """Predicted seconds of micro-batches on the pipeline stages of an engine and the links between.

    Args:
        cost: Cost model that predicts compute and transfer times.
        num_stages: Number of pipeline stages.
    """

    def __init__(self, cost: CostModel, num_stages: int = 1) -> None:
        self._cost = cost
        self._num_stages = num_stages

    def stages(self, work: StageWork) -> list[float]:
        """Return the compute seconds of each stage."""
        return [self._cost.stage_seconds(stage, work) for stage in range(self._num_stages)]

    def hops(self, work: StageWork) -> list[float]:
        """Return the transfer seconds from each stage to the next one."""
        return [
            self._cost.activation_transfer(stage, work).total_seconds
            for stage in range(self._num_stages - 1)
        ]

    def total(self, work: StageWork) -> float:
        """Return the seconds of a micro-batch on all stages and links in sequence."""
        return sum(self.stages(work)) + sum(self.hops(work))

    def largest_batch(self, mean_context: float, limit_seconds: float, most: int) -> int:
        """Return the largest batch whose decode step meets a time limit; 0 if there is none.

        Args:
            mean_context: Tokens of context per request.
            limit_seconds: Limit of the time of a step on all stages and links.
            most: Largest batch.
        """

        def keeps(batch_size: int, *_: int) -> bool:
            return self.total(decode_step_work(batch_size, mean_context)) <= limit_seconds

        return bisect_last(keeps, 0, most + 1)

    def decode_rate(self, mean_context: float, limit_seconds: float, most: int) -> float:
        """Return the most decode steps per second of batches within a time limit; 0 if none is.

        Every stage computes a batch of its own, so the slowest stage determines the rate.

        Args:
            mean_context: Tokens of context per request.
            limit_seconds: Limit of the time of a step on all stages and links.
            most: Largest batch of a stage.
        """
        highest = 0.0
        for batch_size in range(1, most + 1):
            work = decode_step_work(batch_size, mean_context)
            stages = self.stages(work)
            if sum(stages) + sum(self.hops(work)) > limit_seconds:
                break
            highest = max(highest, batch_size / max(stages))
        return highest
