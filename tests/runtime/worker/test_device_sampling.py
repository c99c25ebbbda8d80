"""Drawing on a device under the scheduler: what looks back sees the same output in every setting,
and what goes wrong in a row stays there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import ALL_TOKENS_BANNED, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.cuda.sampler import LogitEditPlanner
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.sampling import (
    build_sampling_metadata,
    create_sampling_states,
)
from gllm.scheduler.scheduler import Scheduler
from tests.runtime.worker.test_greedy import NEW_TOKENS
from tests.runtime.worker.test_logprobs import Told
from tests.support.engines.pipeline import GREEDY, Pipeline
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    LONGEST,
    NUM_BLOCKS,
    as_on_a_device,
    executor_on,
)
from tests.support.gpu.fake_streams import FakeQueues

PROMPTS = [[5, 9, 3, 7, 7], [5, 9, 3, 7, 2, 6, 17, 8, 8], [21], [5, 9, 3, 7, 7, 41, 42]]
LOOKING = SequenceSamplingParams(
    temperature=0.8,
    seed=4,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={9: 1.5},
    bad_words=((11,), *((any_, 12) for any_ in range(20)), (3, 9, 4)),
    logprobs=2,
)


class OnDevice(Told):
    """One stage on the fake device under a scheduler of its own blocks."""

    def __init__(self, queues: FakeQueues, folder: Path, blocks: int, **options: Any) -> None:
        given = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        given["expected_output_tokens"] = 0
        engine = EngineConfig.from_options(str(folder), max_model_len=LONGEST, **given | options)
        super().__init__(folder, 1, blocks, options={"block_size": 8})
        self.scheduler = Scheduler(engine.scheduler.resolve(1, blocks, LONGEST))
        self.executors: list[Executor] = [executor_on(queues, folder, graphs=4)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[list[int], list]]:
    """What each prompt draws and tells on the CPU with a pipeline for itself."""
    answers = []
    for prompt in PROMPTS:
        pipeline = Told(folder, 1)
        pipeline.ask(0, prompt, LOOKING)
        tokens = pipeline.run()[0]
        answers.append((tokens, [entry.top_ids for entry in pipeline.logprobs[0]]))
    return answers


@pytest.fixture
def queues() -> Iterator[FakeQueues]:
    with as_on_a_device(), FakeQueues(6) as made:
        yield made


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (16, {"prefix_cache": False}),
        pytest.param(
            40,
            {"max_prefill_tokens": 4, "min_prefill_tokens": 4, "max_num_batched_tokens": 8},
            marks=pytest.mark.full,
        ),
        pytest.param(40, {}, marks=pytest.mark.full),
        pytest.param(40, {"async_scheduling": False}, marks=pytest.mark.full),
        pytest.param(16, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_looks_back_sees_the_same_in_every_setting(
    queues: FakeQueues, folder: Path, alone: list, blocks: int, options: dict[str, Any]
) -> None:
    """With and without async scheduling, in chunks, with blocks computed by others, and where
    sequences lose their blocks and get others."""
    pipeline = OnDevice(queues, folder, blocks, **options)
    rounds = 2 if blocks == 16 else 1
    for seq, prompt in enumerate(rounds * PROMPTS):
        pipeline.ask(seq, prompt, LOOKING)
    generated = pipeline.run()
    assert all(len(tokens) == NEW_TOKENS for tokens in generated.values())
    got = [
        (generated[seq], [entry.top_ids for entry in pipeline.logprobs[seq]])
        for seq in sorted(generated)
    ]
    assert got == rounds * alone
    stats = pipeline.scheduler.stats()
    assert (stats.preemptions > 0) == (blocks == 16)
    if options.get("prefix_cache", True):
        # What was cached is looked back at too.
        pipeline.ask(19, PROMPTS[1], LOOKING)
        assert pipeline.run()[19] == alone[1][0]
        assert pipeline.scheduler.stats().prefix_hits >= 8


def executor_with(
    queues: FakeQueues, folder: Path, specs: list[SequenceSamplingParams]
) -> tuple[CudaExecutor, Pipeline]:
    """A stage with a sequence for each of the specs, prompts as above."""
    book = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    executor = executor_on(queues, folder)
    for seq, (prompt, spec) in enumerate(zip(PROMPTS, specs, strict=False)):
        book.add(seq, prompt)
        executor.register(RegisterSequences(seq, len(prompt), prompt, spec))
    return executor, book


def test_everything_forbidden_is_an_error_of_the_row(queues: FakeQueues, folder: Path) -> None:
    """Which tells nothing; its neighbour does."""
    told = SequenceSamplingParams(temperature=0.0, logprobs=1)
    forbidden = msgspec.structs.replace(told, allowed=(2, 10**6), bad_words=((2,),))
    executor, book = executor_with(queues, folder, [forbidden, told])
    batch = executor.prepare(book.plan([book.row(seq, len(PROMPTS[seq])) for seq in (0, 1)]))
    results, logprobs = executor.sample(batch, executor.compute(batch, None))
    assert [(result.token_id > 0, result.error) for result in results] == [
        (False, ALL_TOKENS_BANNED),
        (True, ""),
    ]
    assert [row.seq for row in logprobs] == [1]


@pytest.mark.parametrize("row", [0, 1])
def test_bad_logits_end_their_own_row(queues: FakeQueues, folder: Path, row: int) -> None:
    """Of the prompt that is scored, or of the token to be drawn."""
    spec = SequenceSamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    executor, book = executor_with(queues, folder, [spec, spec])
    head = executor.stage.compute_logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made = head(hidden)
        if row == 0 and len(hidden) > 2:
            made[1] = float("nan")
        if row == 1 and len(hidden) == 2:
            made[1, 4] = float("inf")
        return made

    executor.stage.compute_logits = logits  # type: ignore[method-assign]
    batch = executor.prepare(book.plan([book.row(seq, len(PROMPTS[seq])) for seq in (0, 1)]))
    results, logprobs = executor.sample(batch, executor.compute(batch, None))
    assert ["not finite" in result.error for result in results] == [row == 0, row == 1]
    assert [told.seq for told in logprobs] == [1 - row]


def test_logits_are_computed_of_rows_that_sample_alone(queues: FakeQueues, folder: Path) -> None:
    """Not of a chunk's other tokens, and not at all where no row samples."""
    executor, book = executor_with(queues, folder, [GREEDY] * 3)
    computed: list[int] = []
    head = executor.stage.compute_logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return head(hidden)

    executor.stage.compute_logits = logits  # type: ignore[method-assign]
    steps = [
        [book.row(0, 2, samples=False), book.row(1, 4, samples=False)],
        [book.row(0, 3), book.row(1, 2, samples=False)],
        [book.row(1, 3), book.row(2, 1)],
    ]
    for rows in steps:
        batch = executor.prepare(book.plan(rows))
        executor.sample(batch, executor.compute(batch, None))
    assert computed == [0, 1, 2]


def test_edits_of_choices_are_made_once_and_forgotten() -> None:
    planner = LogitEditPlanner(60, BLOCK_SIZE)
    states = create_sampling_states(RegisterSequences(0, 1, [3], LOOKING, n=3))
    rows = build_sampling_metadata([(seq, 0) for seq in range(3)], states, [0] * 3)
    assert planner.plan(rows, [1] * 3, np.zeros((3, 1), dtype=np.int64)) is not None
    assert planner.num_requests == 1
    del states, rows
    assert planner.num_requests == 0
