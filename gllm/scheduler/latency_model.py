"""Mean latency of requests by the size of prefill chunks, predicted from averages of the load.

By Little's law the mean latency is the number of requests in the system divided by their rate: the
Q prompts that wait and the D sequences that decode. Chunks of C tokens, beside d decodes in a
micro-batch on p stages, change both. With t(n) the interval of micro-batches of n tokens, W the
mean prompt length, w the prefill tokens per second, and b the mean interval divided by its
prediction, which leaves out the slow steps of a busy machine:

    rho  = b * w * t(d + C) / C                           utilization by prefill
    T(C) = t(d + C) * (W / C / (1 - rho) + p - 1)         time to first token
    m(C) = t(d) + psi * (t(d + C) - t(d))                 time per micro-batch of a decode
    psi / (1 - psi)  in proportion to  1 / C + (p - 1) * (1 - rho) / W

T is that of an M/M/1 queue which C tokens leave per micro-batch. psi is the share of decodes beside
a prefill chunk or within the p - 1 micro-batches behind one, which it delays on every stage. It
grows with the number of chunks and, as the second term, of ends of busy periods. Q and D change in
proportion to T and m.
"""

from typing import NamedTuple

from gllm.scheduler.step_averages import StepAverages
from gllm.scheduler.step_cost import StepTimeCurve

MAX_UTILIZATION = 0.98
"""Utilization from which on the waiting time grows in a straight line instead of to infinity."""
WAITING_WEIGHT = 3.0
"""Weight of a waiting prompt beside a running decode. Of sizes of about equal latency the larger
one is chosen, because it has more throughput."""
SMALLEST_DECODES = 1e-3
"""Least number of decodes per step, of those with and of those without prefill."""


class PredictedLatency(NamedTuple):
    """Prediction of a ChunkLatencyModel for a chunk size."""

    ttft: float
    """T: time to first token in seconds."""
    decode: float
    """m: time per micro-batch of a decode in seconds."""
    odds: float
    """psi / (1 - psi): decodes that prefill delays in relation to the others."""


class ChunkLatencyModel:
    """Predicts the mean latency by chunk size, relative to that of the present size.

    Calls return 3 Q T(C) / T(C0) + D m(C) / m(C0), with the symbols of this module.

    Args:
        averages: averages of the load; C0 is the mean size of their chunks.
        curve: fitted step time, with the context of the averages.
        stages: number of pipeline stages.
    """

    def __init__(self, averages: StepAverages, curve: StepTimeCurve, stages: int) -> None:
        self._averages = averages
        self._curve = curve
        self._num_edges = stages - 1
        self._prompt_tokens = averages.prefill_tokens / averages.prompts
        self._tokens_per_second = averages.prefill_tokens / averages.elapsed_seconds
        self._pairs_per_token = averages.pairs / averages.prefill_tokens
        self._base = curve.seconds(averages.decodes)
        # Neither share is zero, so that their ratio is finite.
        undelayed = max(averages.decodes - averages.delayed_decodes, SMALLEST_DECODES)
        delayed = max(averages.delayed_decodes, SMALLEST_DECODES)
        self._odds = 1.0
        chunk_tokens = averages.prefill_tokens / averages.prefill_steps
        chunk_seconds = curve.seconds(
            averages.decodes + chunk_tokens, chunk_tokens * self._pairs_per_token
        )
        predicted = self._base + averages.prefill_steps * (chunk_seconds - self._base)
        self._slowness = averages.seconds / predicted
        """b."""
        present = self._predict(chunk_tokens)
        self._odds = delayed / undelayed / present.odds
        present = self._predict(chunk_tokens)
        self._waiting_weight = WAITING_WEIGHT * averages.waiting / present.ttft
        self._decode_weight = averages.running / present.decode

    def __call__(self, tokens: float) -> float:
        """Return the cost of chunks of `tokens`."""
        latency = self._predict(tokens)
        return self._waiting_weight * latency.ttft + self._decode_weight * latency.decode

    def _predict(self, tokens: float) -> PredictedLatency:
        averages = self._averages
        num_pairs = tokens * self._pairs_per_token
        seconds = self._curve.seconds(averages.decodes + tokens, num_pairs)
        utilization = self._tokens_per_second * self._slowness * seconds / tokens
        spare = 1 - min(utilization, MAX_UTILIZATION)
        queue = (1 + max(0.0, utilization - MAX_UTILIZATION) / spare) / spare
        ttft = seconds * (self._prompt_tokens / tokens * queue + self._num_edges)
        ends = self._num_edges * max(0.0, 1 - utilization) / self._prompt_tokens
        odds = self._odds * (1 / tokens + ends)
        decode = self._base + odds / (1 + odds) * (seconds - self._base)
        return PredictedLatency(ttft, decode, odds)
