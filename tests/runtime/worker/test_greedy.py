"""Scheduler and stages together against transformers: the same greedy tokens in every setting.

The processes are left out: plans are prepared by all stages when they are made and computed as late
as the limit of micro-batches in flight allows.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.kernels.native.library import load_library
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.executor import Executor
from gllm.scheduler.plan import StepOutput, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import FAMILIES, SMALL, reference, save
from tests.support.scheduler.pipeline import EVERY_POLICY, RESERVING_POLICIES

GREEDY = SequenceSamplingParams(temperature=0.0)
NEW_TOKENS = 12
NUM_STATE_SLOTS = 20
"""State slots of models with recurrent layers."""
LENGTHS = (1, 7, 33, 64, 90)
"""Of the prompts: within a block, at its end, over several chunks."""


@dataclass
class Scheduled:
    """A scheduler over the stages of one model."""

    folder: Path
    stages: int
    num_blocks: int = 200
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = read_config(self.folder)
        engine = EngineConfig.from_options(
            str(self.folder), **{"block_size": 8, "expected_output_tokens": 0} | self.options
        )
        num_slots = NUM_STATE_SLOTS if model.model.has_state else 0
        self.scheduler = Scheduler(
            engine.scheduler.resolve(self.stages, self.num_blocks, 128, num_state_slots=num_slots)
        )
        self.executors: list[Executor] = [
            CpuExecutor(model, engine, self.stages, layers)
            for layers in split_layers(model.model, self.stages)
        ]
        for executor in self.executors:
            executor.load(self.folder, lambda done, total: None)
            executor.allocate(self.num_blocks, 8, num_state_slots=num_slots)
        self.generated: dict[int, list[int]] = {}
        self._plans: deque[tuple[StepPlan, list[Batch]]] = deque()

    def add(self, seq: int, prompt: list[int], n: int = 1) -> None:
        """Submit a request and register it everywhere."""
        self.scheduler.add(SchedulerRequest(seq, prompt, NEW_TOKENS, n=n), 0.0)
        for executor in self.executors:
            executor.register(RegisterSequences(seq, len(prompt), prompt, GREEDY, n))

    def run(self) -> dict[int, list[int]]:
        """All generated tokens, by sequence, once everything has ended."""
        while self.scheduler.stats().unfinished:
            while (plan := self.scheduler.schedule(0.0)) is not None:
                self._plans.append((plan, [stage.prepare(plan) for stage in self.executors]))
            self._commit()
        return self.generated

    def _commit(self) -> tuple[StepOutput, list[SampleDetails]]:
        """Compute and commit the oldest plan: what it brought, what its rows told."""
        plan, batches = self._plans.popleft()
        hidden = None
        for executor, batch in zip(self.executors, batches, strict=True):
            hidden = executor.compute(batch, hidden)
        assert hidden is not None
        sampled, told = self.executors[-1].sample(batches[-1], hidden)
        outcome = self.scheduler.commit(StepResult(plan.step, sampled))
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            self.generated.setdefault(seq, []).append(token)
        return outcome, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("greedy"))


def prompts() -> list[list[int]]:
    """Two of each length, one of them beginning like all others."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        own = torch.randint(3, SMALL["vocab_size"], (length,), generator=generator).tolist()
        made += [own, [5] * (length // 2) + own[length // 2 :]]
    return made


@cache
def greedy_tokens(family: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
    """Return the tokens that transformers finds likeliest behind the prompt and behind each token
    of the answer but its last.

    They equal the answer exactly where the answer is the greedy one, and take one forward pass.
    """
    with torch.inference_mode():
        logits = reference(family)(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def check_greedy(family: str, answers: list[list[int]]) -> None:
    """Assert that each prompt's answer is what transformers generates greedily."""
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert len(answer) == NEW_TOKENS
        assert answer == greedy_tokens(family, tuple(prompt), tuple(answer))


def check(pipeline: Scheduled, family: str = "qwen3") -> None:
    for seq, prompt in enumerate(prompts()):
        pipeline.add(seq, prompt)
    generated = pipeline.run()
    check_greedy(family, [generated[seq] for seq in sorted(generated)])


CHUNKED = {"max_prefill_tokens": 16, "min_prefill_tokens": 4, "max_num_batched_tokens": 20}
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "whole prompts": (1, 200, {}),
    "chunked": (1, 200, CHUNKED | {"prefix_cache": False}),
    "chunked over two stages": (2, 200, CHUNKED | {"prefix_cache": False}),
    "chunked over four stages, cached": (4, 200, CHUNKED),
    "preempted": (1, 18, {"prefix_cache": False}),
    "preempted over two stages, cached": (2, 18, {}),
}
"""(stages, blocks, options)."""


ESSENTIAL = ("whole prompts", "chunked over four stages, cached", "preempted")
"""Settings that show each kind of batch and each kind of stage; the others combine them anew, and
the tests below have all combinations with one family."""
KINDS = ("gemma2", "bloom", "mixtral", "deepseek-v2", "qwen3.5")
"""Families with every kind of attention and feed-forward layer. The logits of the others are
compared in test_executor.py."""


@pytest.mark.parametrize(
    "settings",
    [ESSENTIAL, pytest.param(sorted({*SETTINGS} - {*ESSENTIAL}), marks=pytest.mark.long)],
    ids=["essential", "others"],
)
@pytest.mark.parametrize("family", full_but(KINDS, FAMILIES))
def test_every_family_in_every_setting(
    family: str, settings: Sequence[str], tmp_path: Path
) -> None:
    folder = save(family, tmp_path)
    for name in settings:
        stages, blocks, options = SETTINGS[name]
        pipeline = Scheduled(folder, stages, blocks, options)
        check(pipeline, family)
        assert bool(pipeline.scheduler.stats().preemptions) == name.startswith("preempted"), name


@pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")
def test_a_cache_in_int8_gives_the_same_answers_in_every_setting(folder: Path) -> None:
    """Also of sequences that were preempted, or whose prefixes are cached."""
    answers = []
    for stages, blocks, options in SETTINGS.values():
        pipeline = Scheduled(folder, stages, blocks, {"kv_cache_dtype": "int8"} | options)
        for seq, prompt in enumerate(prompts()):
            pipeline.add(seq, prompt)
        answers.append(pipeline.run())
    assert all(each == answers[0] for each in answers)


def policy_cases(*stages: int, quick: Collection[str] = EVERY_POLICY) -> list[Any]:
    """Policies, stages and whether prefixes are cached: each policy of `quick` once in `make test`,
    each pair of values in `make test-all`."""
    cases = []
    for at, policy in enumerate(EVERY_POLICY):
        for (index, count), has_cache in product(enumerate(stages), (False, True)):
            completes_pairs = has_cache == ((at // 2 + index) % 2 == 0)
            mark = pytest.mark.full if completes_pairs else pytest.mark.long
            is_quick = policy in quick and completes_pairs and index == at % 2
            cases.append(pytest.param(policy, count, has_cache, marks=[] if is_quick else [mark]))
    return cases


@pytest.mark.parametrize(("policy", "stages", "prefix_cache"), policy_cases(1, 4))
def test_every_policy_chunked(folder: Path, policy: str, stages: int, prefix_cache: bool) -> None:
    options = {"policy": policy, "prefix_cache": prefix_cache, **CHUNKED}
    check(Scheduled(folder, stages, options=options))


PREEMPTING = ("throttle", "balance", "vllm", "orca+", "prefill-first", "splitwise")
"""Policies that preempt or reserve in different ways."""


@pytest.mark.parametrize(("policy", "stages", "prefix_cache"), policy_cases(1, 2, quick=PREEMPTING))
def test_under_forced_preemption(
    folder: Path, policy: str, stages: int, prefix_cache: bool
) -> None:
    """16 blocks hold one sequence of full length, and the ten wait for each other."""
    pipeline = Scheduled(folder, stages, 18, {"policy": policy, "prefix_cache": prefix_cache})
    check(pipeline)
    has_preempted = pipeline.scheduler.stats().preemptions > 0
    assert has_preempted == (policy not in RESERVING_POLICIES)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("phase_pure", [True, False])
def test_with_and_without_async_scheduling_and_mixing(
    folder: Path, async_scheduling: bool, phase_pure: bool
) -> None:
    check(
        Scheduled(
            folder, 1, options={"async_scheduling": async_scheduling, "phase_pure": phase_pure}
        )
    )


def test_a_second_round_from_a_warm_prefix_cache(folder: Path) -> None:
    pipeline = Scheduled(folder, 2, 600)
    check(pipeline)
    for seq, prompt in enumerate(prompts(), start=100):
        pipeline.add(seq, prompt)
    generated = pipeline.run()
    check_greedy("qwen3", [generated[seq] for seq in sorted(generated) if seq >= 100])
    assert pipeline.scheduler.stats().prefix_hits >= 2 * (24 + 56 + 88)


def test_alone_and_as_several_choices(folder: Path) -> None:
    answers = []
    for index, prompt in enumerate(prompts()):
        pipeline = Scheduled(folder, 2, options={"prefix_cache": index % 2 == 0})
        pipeline.add(0, prompt, n=3)
        first, *others = pipeline.run().values()
        assert others == [first] * 2
        answers.append(first)
    check_greedy("qwen3", answers)
