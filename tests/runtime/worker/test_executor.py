"""Stages against transformers, through plans: every family, cut, chunking and mixture."""

from copy import deepcopy
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.scheduler.plan import ON_DEVICE, StepPlan
from tests.runtime.worker.test_greedy import KINDS
from tests.support.engines.pipeline import GREEDY, Pipeline
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import FAMILIES, SMALL, reference, save

TOLERANCE = 1e-4
"""On max|a - b| / max|b| of the logits, float32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Checkpoint folders by family and seed, made when first asked for."""

    class Made(dict):
        def __missing__(self, key: tuple[str, int]) -> Path:
            self[key] = save(key[0], tmp_path_factory.mktemp(key[0]), seed=key[1])
            return self[key]

    return Made()


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL["vocab_size"], (length,), generator=generator).tolist()


def expected(family: str, seed: int, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of transformers."""
    with torch.inference_mode():
        return reference(family, seed)(torch.tensor([tokens])).logits[0]


def difference(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((actual - wanted).abs().max() / wanted.abs().max()).item()


def all_logits(pipeline: Pipeline, seq: int, chunk: int) -> torch.Tensor:
    """Logits at each chunk's end, then at every position of a sequence's prompt.

    Only a row's last position is sampled: behind the chunks, one batch computes every position
    once more as a decode of its own.
    """
    held = pipeline.held[seq]
    length = held.prompt_len
    rows = []
    while held.computed < length:
        row = pipeline.row(seq, min(chunk, length - held.computed))
        rows.append(pipeline.logits(pipeline.plan([row]))[1])
    rows.append(pipeline.logits(pipeline.decodes_again(seq))[1])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("family", "seed"), full_but([*zip(FAMILIES, cycle(range(3)))], product(FAMILIES, range(3)))
)
def test_logits_match_transformers(
    folders: dict[tuple[str, int], Path], family: str, seed: int
) -> None:
    """Each family in one way of three in `make test`."""
    stages = (1, 2, 4)[seed]
    chunk = (64, 7, 16)[seed]
    prompt = prompt_of(37, seed)
    pipeline = Pipeline(folders[family, seed], stages)
    pipeline.add(1, prompt)
    actual = all_logits(pipeline, 1, chunk)
    wanted = expected(family, seed, prompt)
    ends = [min(end, 37) - 1 for end in range(chunk, 37 + chunk, chunk)]
    assert difference(actual, torch.cat((wanted[ends], wanted))) < TOLERANCE


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_mixed_batches_match_transformers(
    folders: dict[tuple[str, int], Path], stages: int
) -> None:
    """Decodes of uneven length beside a fresh prompt and a chunk on cached context."""
    pipeline = Pipeline(folders["qwen2", 0], stages, num_blocks=200)
    prompts = {seq: prompt_of(length, seq) for seq, length in enumerate((3, 30, 9, 50, 21, 300))}
    for seq, prompt in prompts.items():
        pipeline.add(seq, prompt)
    pipeline.run([pipeline.row(seq, len(prompts[seq])) for seq in (0, 1, 2)])
    pipeline.run([pipeline.row(3, 20, samples=False)])
    for _ in range(2):
        pipeline.run([pipeline.row(seq, 1) for seq in (0, 1, 2)])
    rows = [pipeline.row(seq, 1) for seq in (2, 0, 1)]
    rows += [pipeline.row(3, 30), pipeline.row(4, 21), pipeline.row(5, 300)]
    _, actual = pipeline.logits(pipeline.plan(rows))
    wanted = [expected("qwen2", 0, pipeline.held[row.seq].tokens)[-1] for row in rows]
    assert difference(actual, torch.stack(wanted)) < TOLERANCE


def greedy(pipeline: Pipeline, seq: int, count: int) -> list[int]:
    """`count` tokens after the prompt, or after what a preemption left to be computed again."""
    held = pipeline.held[seq]
    while len(held.tokens) - held.prompt_len < count:
        pipeline.run([pipeline.row(seq, len(held.tokens) - held.computed)])
    return held.tokens[held.prompt_len :]


def test_greedy_tokens_are_those_of_transformers(
    folders: dict[tuple[str, int], Path],
) -> None:
    prompt = prompt_of(20, 5)
    pipeline = Pipeline(folders["llama3", 0], 2)
    pipeline.add(1, prompt, SequenceSamplingParams(temperature=0.0, top_k=5))
    tokens = greedy(pipeline, 1, 12)
    logits = expected("llama3", 0, prompt + tokens)
    assert tokens == logits[19:31].argmax(-1).tolist()


def test_preempted_sequence_goes_on_as_before(folders: dict[tuple[str, int], Path]) -> None:
    """A preemption replaces the block table; generated tokens come with the plan."""
    pipeline = Pipeline(folders["qwen3", 0], 2)
    for seq in (1, 2):
        pipeline.add(seq, prompt_of(11, 3))
    whole = greedy(pipeline, 1, 10)
    greedy(pipeline, 2, 4)
    pipeline.preempt(2)
    held = pipeline.held[2]
    pipeline.run([pipeline.row(2, 9, samples=False)])
    pipeline.run([pipeline.row(2, len(held.tokens) - 9)])
    assert greedy(pipeline, 2, 10) == whole


def test_async_scheduling_reads_the_token_that_was_sampled(
    folders: dict[tuple[str, int], Path],
) -> None:
    pipeline = Pipeline(folders["llama2", 0])
    for seq in (1, 2):
        pipeline.add(seq, prompt_of(8, 1))
    wanted = greedy(pipeline, 1, 5)
    executor = pipeline.executors[0]
    plans = [pipeline.plan([pipeline.row(2, 8)])]
    for _ in range(4):
        row = pipeline.row(2, 1, token_ids=[ON_DEVICE])
        plans.append(pipeline.plan([row]))
    batches = [executor.prepare(plan) for plan in plans]
    assert [bool(batch.placeholders) for batch in batches] == [False, True, True, True, True]
    tokens = []
    for batch in batches:
        results, _ = executor.sample(batch, executor.compute(batch, None))
        tokens += [result.token_id for result in results]
    assert tokens == wanted


def test_bad_logits_end_their_own_sequence_only(folders: dict[tuple[str, int], Path]) -> None:
    pipeline = Pipeline(folders["llama2", 0])
    for seq in (1, 2, 3):
        pipeline.add(seq, prompt_of(8, seq))
    batch, logits = pipeline.logits(pipeline.plan([pipeline.row(seq, 8) for seq in (1, 2, 3)]))
    wanted = logits.argmax(-1).tolist()
    logits = logits.clone()
    logits[1, 7] = float("nan")
    results, _ = pipeline.executors[0].sample(batch, logits)
    assert [result.seq for result in results] == [1, 2, 3]
    assert [result.token_id for result in results] == [wanted[0], 0, wanted[2]]
    assert [bool(result.error) for result in results] == [False, True, False]


def test_nan_in_freed_blocks_does_not_leak(folders: dict[tuple[str, int], Path]) -> None:
    """A block's next owner never reads what the last one left behind its own tokens."""
    pipeline = Pipeline(folders["qwen2", 0], num_blocks=16)
    for cache in pipeline.executors[0].layer_caches:
        for tensor in cache:
            tensor[:-1].fill_(float("nan"))
    pipeline.add(1, prompt_of(5, 0))
    pipeline.add(2, prompt_of(9, 0))
    pipeline.run([pipeline.row(1, 5), pipeline.row(2, 9)])
    results = pipeline.run([pipeline.row(1, 1), pipeline.row(2, 1)])
    assert not any(result.error for result in results)


def test_n_choices_draw_from_streams_of_their_own(
    folders: dict[tuple[str, int], Path],
) -> None:
    """Registered as one, they are as sequences registered with their own choice index."""
    pipeline = Pipeline(folders["llama2", 0])
    prompt = prompt_of(8, 0)
    for seq in (1, 2, 3):
        pipeline.add(seq, prompt, SequenceSamplingParams(temperature=2.0, seed=5, choice=seq - 1))
    alone = [r.token_id for seq in (1, 2, 3) for r in pipeline.run([pipeline.row(seq, 8)])]
    together = Pipeline(folders["llama2", 0])
    for seq in (1, 2, 3):
        together.add(seq, prompt)
    together.executors[0].register(
        RegisterSequences(1, 8, prompt, SequenceSamplingParams(2.0, seed=5), n=3)
    )
    results = together.run([together.row(seq, 8) for seq in (1, 2, 3)])
    assert [result.token_id for result in results] == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("family", full_but(KINDS, FAMILIES))
def test_bfloat16_stays_close(folders: dict[tuple[str, int], Path], family: str) -> None:
    """Within twice the error of transformers in bfloat16; a wrong order gives more.

    Half of the tokens count: rounding changes the experts of others, in transformers as here.
    """
    prompt = prompt_of(37, 0)
    pipeline = Pipeline(folders[family, 0], 2, dtype="bfloat16")
    pipeline.add(1, prompt)
    model = deepcopy(reference(family, 0))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
        theirs = model.to(torch.bfloat16)(torch.tensor([prompt])).logits[0]

    def error(logits: torch.Tensor) -> float:
        return ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median().item()

    assert error(all_logits(pipeline, 1, 10)[-37:]) < 2 * error(theirs)


def test_plan_without_samples_and_release(folders: dict[tuple[str, int], Path]) -> None:
    """A plan may only release; what was kept of the sequence is gone."""
    pipeline = Pipeline(folders["llama2", 0], 2)
    pipeline.add(1, prompt_of(8, 0), GREEDY)
    pipeline.run([pipeline.row(1, 4, samples=False)])
    assert pipeline.run([pipeline.row(1, 4)])[0].seq == 1
    pipeline.run([], released=[1])
    with pytest.raises(KeyError):
        pipeline.executors[0].prepare(StepPlan(9, [pipeline.row(1, 1)], []))
    for executor in pipeline.executors:
        assert not executor.held_seqs


def test_sizes_add_up(folders: dict[tuple[str, int], Path]) -> None:
    """Stages hold the weights once, an embedding that is tied across stages twice."""
    folder = folders["qwen2", 0]
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    split = sum(executor.weight_bytes for executor in Pipeline(folder, 2).executors)
    whole = Pipeline(folder).executors[0]
    assert 0 <= stored - whole.weight_bytes < 10_000
    assert split - whole.weight_bytes == SMALL["vocab_size"] * SMALL["hidden_size"] * 4
    assert whole.block_bytes == 2 * 4 * 4 * 2 * 8 * 4
