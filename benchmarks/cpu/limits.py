"""Limits of this machine: read bandwidth, bfloat16 GEMM rate and the model's speed at these rates.

`python -m benchmarks.cpu.limits THREADS` prints the rates as JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.cpu.model import (
    BODY_PARAMETERS,
    HEAD_PARAMETERS,
    KV_BYTES,
    PAIR_FLOPS,
    WEIGHT_BYTES,
)
from benchmarks.cpu.workplace import ROOT, PeerError

READ_BYTES = 2**30
"""Buffer for the bandwidth test: as large as the weights, more than any cache holds."""
GEMM = (1024, 896, 4864)
"""Tokens, inputs, outputs: the largest product in a layer of the model."""
REPEATS = 21


class Rates(NamedTuple):
    """Rates of this machine with `threads` threads."""

    threads: int
    bytes_per_second: float
    """Read bandwidth of memory."""
    flops_per_second: float
    """Rate of bfloat16 products; a multiplication and an addition count as two."""

    def step_seconds(self, tokens: int, logits: int, context: int, pairs: float) -> float:
        """Return the minimum time of a forward pass: a roofline.

        Weights and cache are read once. Each parameter costs two operations per token; each
        query-key pair costs four for every element of a query in every layer. The slower of reading
        and multiplying is the limit.

        Args:
            tokens: Tokens of all sequences.
            logits: Rows of the LM head.
            context: Tokens read from the KV cache.
            pairs: Query-key pairs.
        """
        flops = 2 * (tokens * BODY_PARAMETERS + logits * HEAD_PARAMETERS) + PAIR_FLOPS * pairs
        read = WEIGHT_BYTES + context * KV_BYTES
        return max(read / self.bytes_per_second, flops / self.flops_per_second)

    def decode(self, batch: int, prompt: int, new: int) -> float:
        """Return the maximum output tokens per second of `batch` sequences at their mean length."""
        context = batch * (prompt + new // 2)
        return batch / self.step_seconds(batch, batch, context, context)

    def reading(self, weight_bytes: int, batch: int, prompt: int, new: int) -> float:
        """Return the output tokens per second of `batch` sequences if only reading took time."""
        read = weight_bytes + batch * (prompt + new // 2) * KV_BYTES
        return batch * self.bytes_per_second / read

    def prefill_seconds(self, batch: int, prompt: int) -> float:
        """Return the minimum seconds until `batch` prompts have their first tokens."""
        return self.step_seconds(batch * prompt, batch, 0, batch * prompt**2 / 2)

    def prefill(self, prompt: int) -> float:
        """Return the maximum prompt tokens per second."""
        return prompt / self.prefill_seconds(1, prompt)

    def served(self, streams: int, prompt: int, new: int) -> float:
        """Return the maximum output tokens per second of requests that are all sent at once."""
        decode = (new - 1) * streams / self.decode(streams, prompt, new)
        return streams * new / (self.prefill_seconds(streams, prompt) + decode)


def best_seconds(work: Callable[[], object]) -> float:
    """Return the shortest of REPEATS runs; other processes do not lower the machine's limit."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(threads: int) -> Rates:
    """Measure both rates in this process with `threads` threads."""
    import numpy as np
    import torch

    from gllm.kernels.linear import linear, prepare

    torch.set_num_threads(threads)
    # In large pages, which numpy asks for: some machines read small ones at half the speed.
    numbers = torch.from_numpy(np.arange(READ_BYTES // 4, dtype=np.int32))
    read = best_seconds(numbers.max)
    tokens, inputs, outputs = GEMM
    x = torch.randn(tokens, inputs).bfloat16()
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = prepare(weight)
    plain = best_seconds(lambda: torch.nn.functional.linear(x, weight))
    product = min(plain, best_seconds(lambda: linear(x, packed, None)))
    return Rates(threads, READ_BYTES / read, 2 * tokens * inputs * outputs / product)


def measured(threads: int) -> Rates:
    """Measure the rates in a new process.

    Raises:
        PeerError: The process failed.
    """
    command = [sys.executable, "-m", "benchmarks.cpu.limits", str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"limits are not measured: {done.stderr.strip()[-500:]}")
    return Rates(*json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
