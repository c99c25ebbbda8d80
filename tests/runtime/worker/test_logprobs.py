"""Log-probabilities and penalties through scheduler and stages, against transformers.

Every setting (stages, chunks, preemption, async scheduling, choices) has to tell the same numbers.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gllm.messages.sampling import SampleDetails, SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import RegisterSequences
from gllm.scheduler.plan import StepOutput, StepResult
from gllm.scheduler.sequence import SchedulerRequest
from tests.runtime.worker.test_greedy import NEW_TOKENS, Scheduled, prompts
from tests.support.models.tiny_models import reference, save

TOLERANCE = 2e-4
"""On log-probabilities, float32 sums in different orders."""
FULL = SequenceSamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=5)
PENALIZED = SequenceSamplingParams(
    temperature=0.8,
    seed=4,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias={9: 1.5},
    bad_words=((11,), (9, 12)),
    logprobs=0,
)


@dataclass
class Told(Scheduled):
    """A pipeline that keeps what the rows tell."""

    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[int, list[list[TokenLogprobs]]] = field(default_factory=dict)
    """By sequence, each time it told its prompt's."""

    def ask(
        self, seq: int, prompt: list[int], sampling: SequenceSamplingParams, n: int = 1
    ) -> None:
        """Submit a request and register it everywhere, the prompt where it is needed."""
        reads = sampling.prompt_logprobs is None
        self.scheduler.add(
            SchedulerRequest(seq, prompt, NEW_TOKENS, n=n, reads_prefix_cache=reads), 0.0
        )
        bare = RegisterSequences(seq, len(prompt), n=n)
        for executor in self.executors:
            needed = executor.is_first or (executor.is_last and sampling.needs_prompt)
            own = msgspec.structs.replace(bare, prompt=prompt if needed else [])
            own = msgspec.structs.replace(own, sampling=sampling if executor.is_last else None)
            executor.register(own)

    def _commit(self) -> tuple[StepOutput, list[SampleDetails]]:
        outcome, told = super()._commit()
        for row in told:
            if row.seq in outcome.seqs:
                if row.sampled is not None:
                    self.logprobs.setdefault(row.seq, []).append(row.sampled)
                if row.prompt_logprobs:
                    self.prompts.setdefault(row.seq, []).append(row.prompt_logprobs)
        return outcome, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("logprobs"))


@cache
def exact(tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of what follows each token."""
    with torch.inference_mode():
        return reference("qwen3")(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_entries(entries: list[TokenLogprobs], tokens: list[int], start: int, top: int) -> None:
    """Entries of tokens[start:] against transformers."""
    wanted = exact(tuple(tokens))
    assert [entry.token for entry in entries] == tokens[start:]
    for position, entry in enumerate(entries, start=start):
        row = wanted[position - 1]
        assert abs(entry.logprob - row[entry.token].item()) < TOLERANCE
        best = row.topk(top)
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        told = row[torch.tensor(entry.top_ids, dtype=torch.int64)]
        assert told.tolist() == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        higher = int((row > row[entry.token] + TOLERANCE).sum())
        close = int((row > row[entry.token] - TOLERANCE).sum())
        assert higher < entry.rank <= close


def check(pipeline: Told) -> None:
    for seq, prompt in enumerate(prompts()):
        pipeline.ask(seq, prompt, FULL)
    generated = pipeline.run()
    for seq, prompt in enumerate(prompts()):
        tokens = prompt + generated[seq]
        check_entries(pipeline.logprobs[seq], tokens, len(prompt), 3)
        told = pipeline.prompts.get(seq, [])
        if len(prompt) == 1:
            assert told == []
        else:
            assert len(told) == 1
            check_entries(told[0], prompt, 1, 5)


SMALL_CHUNKS = {"max_prefill_tokens": 16, "min_prefill_tokens": 4, "max_num_batched_tokens": 20}


@pytest.mark.parametrize(
    ("stages", "options"),
    [(1, SMALL_CHUNKS), (2, {"async_scheduling": False}), (4, {})]
    + [
        pytest.param(stages, options, marks=pytest.mark.full)
        for stages, options in [
            (1, {}),
            (2, {}),
            (2, SMALL_CHUNKS),
            (4, SMALL_CHUNKS),
            (1, {"async_scheduling": False}),
            (4, {"async_scheduling": False}),
        ]
    ],
    ids=str,
)
def test_every_cut_and_chunking(folder: Path, stages: int, options: dict[str, Any]) -> None:
    check(Told(folder, stages, options=options))


@pytest.mark.parametrize(
    ("stages", "policy"),
    [(1, "throttle"), (2, "sarathi")]
    + [
        pytest.param(*each, marks=pytest.mark.full)
        for each in [(1, "sarathi"), (2, "throttle"), (1, "prefill-first"), (2, "prefill-first")]
    ],
)
def test_under_preemption_nothing_comes_twice(folder: Path, stages: int, policy: str) -> None:
    pipeline = Told(folder, stages, 18, {"policy": policy, **SMALL_CHUNKS})
    check(pipeline)
    assert pipeline.scheduler.stats().preemptions > 0


def test_a_warm_cache_is_not_read_where_the_prompt_is_told(folder: Path) -> None:
    pipeline = Told(folder, 2, 600)
    check(pipeline)
    prompt = prompts()[-1]
    pipeline.ask(100, prompt, FULL)
    pipeline.ask(101, prompt, SequenceSamplingParams(temperature=0.0))
    pipeline.run()
    check_entries(pipeline.prompts[100][0], prompt, 1, 5)
    assert pipeline.generated[100] == pipeline.generated[101]
    # Only what reads the cache is counted as a query.
    stats = pipeline.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (len(prompt), 88)


def test_the_first_of_several_choices_tells_the_prompt(folder: Path) -> None:
    pipeline = Told(folder, 2)
    prompt = prompts()[4]
    pipeline.ask(0, prompt, msgspec.structs.replace(FULL, temperature=1.5, seed=1), n=3)
    generated = pipeline.run()
    assert list(pipeline.prompts) == [0]
    for seq in range(3):
        check_entries(pipeline.logprobs[seq], prompt + generated[seq], len(prompt), 3)
    assert len({tuple(tokens) for tokens in generated.values()}) == 3


def drawn(pipeline: Told, sampling: SequenceSamplingParams = PENALIZED) -> list[list[int]]:
    for seq, prompt in enumerate(prompts()):
        pipeline.ask(seq, prompt, sampling)
    generated = pipeline.run()
    return [generated[seq] for seq in sorted(generated)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """What each prompt draws under penalties with a pipeline for itself."""
    answers = []
    for prompt in prompts():
        pipeline = Told(folder, 1)
        pipeline.ask(0, prompt, PENALIZED)
        answers.append(pipeline.run()[0])
    return answers


@pytest.mark.parametrize(
    ("stages", "blocks", "options"),
    [
        (1, 200, {"async_scheduling": False}),
        (1, 18, SMALL_CHUNKS),
        pytest.param(1, 200, {}, marks=pytest.mark.full),
        pytest.param(2, 200, SMALL_CHUNKS, marks=pytest.mark.full),
        pytest.param(2, 18, {}, marks=pytest.mark.full),
        pytest.param(4, 200, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_penalties_see_the_same_output_in_every_setting(
    folder: Path, alone: list[list[int]], stages: int, blocks: int, options: dict[str, Any]
) -> None:
    pipeline = Told(folder, stages, blocks, options)
    assert drawn(pipeline) == alone
    assert (pipeline.scheduler.stats().preemptions > 0) == (blocks == 18)
    assert all(11 not in tokens for tokens in alone)


def test_greedy_with_penalties_is_what_transformers_says(folder: Path) -> None:
    """Its own processor for the repetition penalty; the others by their definition."""
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(1.6)
    spec = SequenceSamplingParams(temperature=0.0, repetition_penalty=1.6, frequency_penalty=0.4)
    pipeline = Told(folder, 2, options=SMALL_CHUNKS)
    got = drawn(pipeline, spec)
    assert got != drawn(Told(folder, 2), SequenceSamplingParams(temperature=0.0))
    for prompt, answer in zip(prompts(), got, strict=True):
        tokens = list(prompt)
        for token in answer:
            with torch.inference_mode():
                logits = reference("qwen3")(torch.tensor([tokens])).logits[:, -1]
            scores = processor(torch.tensor([tokens]), logits)[0]
            for seen in tokens[len(prompt) :]:
                scores[seen] -= 0.4
            assert scores[token] >= scores.max() - TOLERANCE
            tokens.append(token)


def test_bad_logits_of_a_prompt_end_their_own_request(folder: Path) -> None:
    pipeline = Told(folder, 1)
    broken = pipeline.executors[0].stage
    head = broken.compute_logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made = head(hidden)
        if len(hidden) == 32:
            made[5] = float("nan")
        return made

    broken.compute_logits = logits  # type: ignore[method-assign]
    made = prompts()
    for seq in (2, 4):
        pipeline.ask(seq, made[seq], FULL)
    ends = {}
    commit = pipeline.scheduler.commit

    def keep(result: StepResult) -> Any:
        outcome = commit(result)
        ends.update({end.seq: end for end in outcome.finished})
        return outcome

    pipeline.scheduler.commit = keep  # type: ignore[method-assign]
    pipeline.run()
    assert (ends[2].finish_reason, ends[4].finish_reason) == ("length", "error")
    assert "not finite" in ends[4].error
