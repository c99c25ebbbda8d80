"""What this machine can do at most: bytes read and numbers multiplied a second, and from that the
fastest that the model can be served.

Owns the measurement of both rates and the arithmetic of limits. Knows nothing of peers. `python -m
benchmarks.cpu.limits THREADS` prints the rates as JSON.
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
"""As large as the weights: no cache holds it."""
GEMM = (1024, 896, 4864)
"""Tokens, inputs, outputs: the largest product of a layer of the model."""
REPEATS = 21


class Rates(NamedTuple):
    """Of this machine with so many threads."""

    threads: int
    bytes_per_second: float
    """Read from memory."""
    flops_per_second: float
    """Of bfloat16 products, a multiplication and an addition being two."""

    def step_seconds(self, tokens: int, logits: int, context: int, pairs: float) -> float:
        """The least time of a forward pass.

        tokens: of all sequences; logits: rows of the head; context: tokens in the cache that are
        read; pairs: of a query and a key. Weights and cache are read once, each parameter costs two
        operations a token, each pair four for every number of a query in every layer, and the
        slower of reading and multiplying is the limit: a roofline.
        """
        flops = 2 * (tokens * BODY_PARAMETERS + logits * HEAD_PARAMETERS) + PAIR_FLOPS * pairs
        read = WEIGHT_BYTES + context * KV_BYTES
        return max(read / self.bytes_per_second, flops / self.flops_per_second)

    def decode(self, batch: int, prompt: int, new: int) -> float:
        """Output tokens a second at most, of `batch` sequences at their mean length."""
        context = batch * (prompt + new // 2)
        return batch / self.step_seconds(batch, batch, context, context)

    def prefill_seconds(self, batch: int, prompt: int) -> float:
        """The least time until `batch` prompts have their first tokens."""
        return self.step_seconds(batch * prompt, batch, 0, batch * prompt**2 / 2)

    def prefill(self, prompt: int) -> float:
        """Prompt tokens a second at most."""
        return prompt / self.prefill_seconds(1, prompt)

    def served(self, streams: int, prompt: int, new: int) -> float:
        """Output tokens a second at most, of requests that are all sent at once."""
        decode = (new - 1) * streams / self.decode(streams, prompt, new)
        return streams * new / (self.prefill_seconds(streams, prompt) + decode)


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest of some repeats: what others do meanwhile is no limit of the machine."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(threads: int) -> Rates:
    """Both rates of this process with so many threads."""
    import torch

    from gllm.kernels.linear import linear, prepare

    torch.set_num_threads(threads)
    numbers = torch.arange(READ_BYTES // 4, dtype=torch.int32)
    read = best_seconds(numbers.max)
    tokens, inputs, outputs = GEMM
    x = torch.randn(tokens, inputs).bfloat16()
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = prepare(weight)
    plain = best_seconds(lambda: torch.nn.functional.linear(x, weight))
    product = min(plain, best_seconds(lambda: linear(x, packed, None)))
    return Rates(threads, READ_BYTES / read, 2 * tokens * inputs * outputs / product)


def measured(threads: int) -> Rates:
    """The rates, measured in a process of its own. Raises PeerError where it fails."""
    command = [sys.executable, "-m", "benchmarks.cpu.limits", str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"limits are not measured: {done.stderr.strip()[-500:]}")
    return Rates(*json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
