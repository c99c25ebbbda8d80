"""Measure the cost of each sampling field on the last stage, relative to greedy rows.

One batch of decodes is planned and sampled repeatedly on one thread. All kinds alternate, so that a
busy machine slows all of them. Run as `python -m benchmarks.sampling`.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.sampling import (
    SamplingState,
    build_sampling_metadata,
    create_sampling_states,
)

PROMPT = list(range(200))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "logit_bias": {"temperature": 0.0, "logit_bias": {7: 1.0, 8: -1.0}},
    "bad_words": {"temperature": 0.0, "bad_words": ((5,), (6, 7), (8, 9, 10))},
    "logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "top_p 0.9": {"top_p": 0.9},
}


def seconds(states: list[SamplingState], logits: torch.Tensor, index: int) -> float:
    """Return the seconds to plan and sample output token `index` of all rows."""
    owners = [(row, 0) for row in range(len(states))]
    copy = logits.clone()
    begin = time.perf_counter()
    sample_output = sample_rows(
        copy, build_sampling_metadata(owners, states, [index] * len(states))
    )
    end = time.perf_counter()
    assert not any(sample_output.errors)
    return end - begin


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logits = torch.randn(args.rows, args.vocabulary)
    states = {
        kind: [
            create_sampling_states(
                RegisterSequences(
                    row, len(PROMPT), PROMPT, SequenceSamplingParams(seed=row, **fields)
                )
            )[0]
            for row in range(args.rows)
        ]
        for kind, fields in KINDS.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(args.rounds):
        for kind in KINDS:
            times[kind].append(seconds(states[kind], logits, index))
    base = statistics.median(times["greedy"])
    print("| rows that ask for | ms | of greedy |\n| --- | --- | --- |")
    for kind, measured in times.items():
        median = statistics.median(measured)
        print(f"| {kind} | {median * 1e3:.2f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
