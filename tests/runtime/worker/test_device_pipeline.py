"""Two stages on one fake device, joined by host staging, against one stage on the CPU."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.scheduler.plan import SampledToken
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import create_edge
from gllm.transport.host_staging import HostStagingReceiver, HostStagingSender
from tests.support.engines.pipeline import GREEDY, Pipeline
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import BLOCK_SIZE, NUM_BLOCKS, as_on_a_device, executor_on
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.models.tiny_models import save

PROMPTS = {1: [5, 9, 3, 7], 2: [11, 4, 8, 2, 6, 17], 3: [21, 30, 12]}
GROUPS = ((1, 2), (3,))
"""Sequences that share micro-batches: while one is under way so is the other."""
ROUNDS = 4


LOOKING = SequenceSamplingParams(
    seed=3, repetition_penalty=1.5, frequency_penalty=0.8, bad_words=((7, 7), (3, 2)), logprobs=1
)


def rounds(pipeline: Pipeline, sampling: SequenceSamplingParams) -> list[list[SampledToken]]:
    """What the CPU samples, step by step."""
    for seq, prompt in PROMPTS.items():
        pipeline.add(seq, prompt, sampling)
    steps = []
    for turn in range(ROUNDS):
        for group in GROUPS:
            rows = [pipeline.row(seq, 1 if turn else len(PROMPTS[seq])) for seq in group]
            steps.append(pipeline.run(rows))
    return steps


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(LOOKING, id="looking back"),
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("seed", full_but([0], range(3)))
def test_two_stages_are_as_one(tmp_path: Path, seed: int, sampling: SequenceSamplingParams) -> None:
    """Whose last one knows the tokens by what it was told alone."""
    folder = save("llama3", tmp_path)
    given: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    expected = rounds(Pipeline(folder, **given), sampling)
    book = Pipeline(folder, **given)
    for seq, prompt in PROMPTS.items():
        book.add(seq, prompt)
    edge, order = create_edge("test-edge"), random.Random(seed)
    shape = EdgeLayout(2, 64, book.config.model.hidden_size, 4)
    with as_on_a_device(), FakeQueues(seed, eagerness=0.4) as queues:
        stages = [executor_on(queues, folder, stage, 2, graphs=4) for stage in range(2)]
        ends = edge.descriptors, shape, torch.float32, queues
        sender = HostStagingSender(*ends, stages[0].stream, in_background=False)
        receiver = HostStagingReceiver(*ends, stages[1].stream)
        for seq, prompt in PROMPTS.items():
            for stage in stages:
                stage.register(RegisterSequences(seq, len(prompt), prompt, sampling))
        results: list[list[SampledToken]] = []
        begun: list = []
        while len(results) < len(expected):
            started, group = len(begun), GROUPS[len(begun) % 2]
            # A group goes on when its own step, the one before the last, is there.
            may_start = started < len(expected) and started - len(results) < 2
            if may_start and (order.random() < 0.6 or started == len(results)):
                turn = started // 2
                rows = [book.row(seq, 1 if turn else len(PROMPTS[seq])) for seq in group]
                plan = book.plan(rows)
                with queues.thread("first"):
                    sender.send(plan.step, stages[0].compute(stages[0].prepare(plan), None))
                    # The thread that wakes the next stage, here at once.
                    sender.signal_next()
                queues.hand_over("first", "second")
                begun.append(plan)
                continue
            plan = begun[len(results)]
            with queues.thread("second"):
                batch = stages[1].prepare(plan)
                count = sum(row.num_tokens for row in plan.rows)
                tokens = stages[1].compute(batch, receiver.receive(plan.step, count))
                sampled, _ = stages[1].sample(batch, tokens)
            queues.hand_over("second", "first")
            for each in sampled:
                book.held[each.seq].tokens.append(each.token_id)
            results.append(sampled)
    edge.close()
    assert results == expected
