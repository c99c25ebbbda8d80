"""Prompt tokens per micro-batch that saturate the stages: DistServe's L_m, TetriInfer's ChunkSize.

Both papers choose the prompt length at which a prefill instance is busy with arithmetic, by
measurements of their devices. `prefill_batch_tokens` 0 chooses it by the step times that the stages
report.
"""

import math

from gllm.scheduler.config import PREFILL_BATCH_TOKENS, SchedulerConfig
from gllm.scheduler.stage_work import StageWork, count_query_key_pairs
from gllm.scheduler.step_cost import (
    DECAY_PER_STEP,
    REFIT_INTERVAL_STEPS,
    DecayedLeastSquares,
    StepTimeCurve,
)

SATURATION = 0.95
"""Share of a step's time that is arithmetic, at which a step counts as saturated. A rounded
roofline has it at 3 times its ridge: 512 tokens for a ridge of 168, that of an A100 at 2 bytes per
weight."""
MIN_BATCH_TOKENS = 32
"""Fewest tokens, whatever is measured."""
GROWTH_LIMIT = 2.0
"""Times the largest measured step, the largest size; the curve is unknown beyond."""
FEATURE_SCALES = (1.0, 1e3, 1e6, 1e6)
"""Typical values of 1, tokens, their square, and query-key pairs with earlier chunks."""


def count_saturating_tokens(curve: StepTimeCurve, largest_measured: float, most: int) -> int:
    """Return the tokens of a step from which on a device is saturated.

    Args:
        curve: time of a step by its prompt tokens, as measured.
        largest_measured: tokens of the largest measured step.
        most: most tokens of a step.

    Returns:
        Tokens, from MIN_BATCH_TOKENS (or `most`, if that is less) to `most`.
    """
    largest = min(most, GROWTH_LIMIT * largest_measured)
    tokens = min(curve.tokens_at_efficiency(SATURATION), largest)
    return min(most, max(MIN_BATCH_TOKENS, math.ceil(tokens)))


class PrefillBatchSize:
    """Prompt tokens per micro-batch of a policy: as configured, or by measured step times.

    Steps without decodes count, those of late with more weight. Until the first fit the paper's
    number is used.

    Args:
        config: resolved configuration; `prefill_batch_tokens` 0 means measured.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.prefill_batch_tokens is not None
        assert config.max_num_batched_tokens is not None
        self._most = config.max_num_batched_tokens
        self.num_tokens = config.prefill_batch_tokens
        """Prompt tokens per micro-batch."""
        self.is_measured = not config.prefill_batch_tokens
        """True if step times change the number."""
        if self.is_measured:
            self.num_tokens = min(self._most, PREFILL_BATCH_TOKENS[config.policy])
        self._squares = DecayedLeastSquares(FEATURE_SCALES)
        self._largest = 0.0
        """Tokens of the largest steps of late."""
        self._num_steps = 0

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn from the measured time of a step, unless the number is configured."""
        if not self.is_measured or seconds <= 0 or not work.prefill_chunks or work.num_decodes:
            return
        tokens = work.num_tokens
        # Attention within a prompt belongs to its tokens; that to earlier chunks does not.
        own_pairs = sum(count_query_key_pairs(0, chunk) for _, chunk in work.prefill_chunks)
        earlier_pairs = work.num_query_key_pairs - own_pairs
        self._squares.observe((1.0, tokens, tokens**2, earlier_pairs), seconds**2)
        self._largest = max(tokens, self._largest * DECAY_PER_STEP)
        self._num_steps += 1
        if self._num_steps % REFIT_INTERVAL_STEPS == 0:
            curve = StepTimeCurve(*self._squares.solve()[:3])
            self.num_tokens = count_saturating_tokens(curve, self._largest, self._most)
