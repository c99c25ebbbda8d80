"""Stages with several ranks return the tokens, log-probabilities and errors of one rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.options.field_types import FieldError
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.kv_cache import block_bytes
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.scheduler import Scheduler
from tests.runtime.worker.test_greedy import CHUNKED, check_greedy, prompts
from tests.runtime.worker.test_logprobs import PENALIZED, Told, check, drawn
from tests.support.engines.rank_stage import make_stages
from tests.support.models.tiny_models import save


@dataclass
class Ranked(Told):
    """A scheduler over stages with several ranks."""

    degrees: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        super().__post_init__()
        model = read_config(self.folder)
        engine = EngineConfig.from_options(
            str(self.folder), **{"block_size": 8, "expected_output_tokens": 0} | self.options
        )
        self.scheduler = Scheduler(engine.scheduler.resolve(self.stages, self.num_blocks, 128))
        self.executors = make_stages(model, engine, self.degrees)  # type: ignore[assignment]
        for executor in self.executors:
            executor.load(self.folder, lambda done, total: None)
            executor.allocate(self.num_blocks, 8)


def ranked(folder: Path, degrees: tuple[int, ...], blocks: int = 200, **options: Any) -> Ranked:
    return Ranked(folder, len(degrees), blocks, options, degrees=degrees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "degrees",
    [(2,), (2, 1), *(pytest.param(each, marks=pytest.mark.full) for each in [(2, 2), (1, 2)])],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(folder: Path, degrees: tuple[int, ...]) -> None:
    """With one stage tokens come from the step before, which only rank 0 has sampled."""
    pipeline = ranked(folder, degrees, **CHUNKED)
    for seq, prompt in enumerate(prompts()):
        pipeline.add(seq, prompt)
    generated = pipeline.run()
    check_greedy("qwen3", [generated[seq] for seq in sorted(generated)])


@pytest.mark.parametrize(
    ("degrees", "blocks"),
    [((2, 2), 18), ((1, 2), 200)]
    + [pytest.param(each, 18, marks=pytest.mark.full) for each in [(2,), (2, 1), (1, 2)]]
    + [pytest.param(each, 200, marks=pytest.mark.full) for each in [(2,), (2, 1), (2, 2)]],
    ids=str,
)
def test_prompts_are_scored_by_all_ranks_together(
    folder: Path, degrees: tuple[int, ...], blocks: int
) -> None:
    """Also under preemption, when part of a prompt has been scored already."""
    pipeline = ranked(folder, degrees, blocks, **CHUNKED)
    check(pipeline)
    assert bool(pipeline.scheduler.stats().preemptions) == (blocks == 18)


def test_penalties_see_the_same_output(folder: Path) -> None:
    assert drawn(ranked(folder, (2, 2)), PENALIZED) == drawn(Told(folder, 2), PENALIZED)


def test_a_request_that_rank_0_cannot_sample_disturbs_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks still compute the same logits, those of its prompt among them."""
    pipeline = ranked(folder, (2,))
    (stage,) = make_stages(
        read_config(folder), EngineConfig.from_options(str(folder), block_size=8), (2,)
    )
    stage.load(folder, lambda done, total: None)
    stage.allocate(64, 8)

    def fail_to_start(*_: Any) -> None:
        raise RuntimeError("no thread is left")

    broken = SequenceSamplingParams(temperature=0.0, prompt_logprobs=2, grammar="a grammar")
    assert stage.ranks[0]._grammars is not None
    monkeypatch.setattr(stage.ranks[0]._grammars, "create_guide", fail_to_start)
    prompt = prompts()[4]
    sound = SequenceSamplingParams(temperature=0.0, prompt_logprobs=2)
    compiling = stage.register(RegisterSequences(0, len(prompt), prompt, broken))
    assert stage.register(RegisterSequences(1, len(prompt), prompt, sound)) is None
    assert "no thread is left" in str(compiling.exception())
    blocks = -(-len(prompt) // 8)
    rows = [
        ScheduledRow(
            seq, 0, 0, len(prompt), list(range(seq * blocks, (seq + 1) * blocks)), [], True
        )
        for seq in (0, 1)
    ]
    batches = stage.prepare(StepPlan(0, rows, []))
    assert [len(batch.prompt_chunks) for batch in batches] == [2, 2]
    sampled, _ = stage.sample(batches, stage.compute(batches, None))
    pipeline.add(1, prompt)
    assert sampled[1].token_id == pipeline.run()[1][0]


def test_a_rank_has_its_part_of_the_cache_and_of_the_weights(folder: Path) -> None:
    config = read_config(folder)
    engine = EngineConfig.from_options(str(folder), block_size=8, dtype="float32")
    layers = range(config.model.num_layers)
    whole = CpuExecutor(config, engine, 1, layers)
    (stage,) = make_stages(config, engine, (2,))
    whole_bytes = block_bytes(config.model.layers, 8, whole.cache_dtype)
    assert whole.block_bytes == whole_bytes
    assert [executor.block_bytes for executor in stage.ranks] == [whole_bytes // 2] * 2
    for executor in (whole, stage):
        executor.load(folder, lambda done, total: None)
    parts = [executor.weight_bytes for executor in stage.ranks]
    # Norms are on both ranks, and the vocabulary is odd.
    assert whole.weight_bytes < sum(parts) < 1.1 * whole.weight_bytes
    assert max(parts) < 1.05 * min(parts)


def test_ranks_that_cannot_share_the_model_are_refused(folder: Path) -> None:
    config = read_config(folder)
    engine = EngineConfig.from_options(str(folder), block_size=8)
    with pytest.raises(FieldError, match="heads"):
        CpuExecutor(config, engine, 1, range(1), rank=0, num_ranks=4)


def test_weights_go_to_the_same_rank_only(folder: Path) -> None:
    """And the numbers say how many ranks added up."""
    config = read_config(folder)
    engine = EngineConfig.from_options(str(folder), block_size=8)
    (first,), (second,) = (make_stages(config, engine, (2,)) for _ in range(2))
    first.load(folder, lambda done, total: None)
    assert "2 ranks" in first.ranks[0].numerics
    for executor in first.ranks:
        executor.close()
    stage = first.ranks[0].stage
    second.ranks[0].load(folder, lambda done, total: None, [first.ranks[0]])
    assert second.ranks[0].stage is stage
    other = first.ranks[1].stage
    third = CpuExecutor(config, engine, 1, range(config.model.num_layers), num_ranks=2)
    third.load(folder, lambda done, total: None, [first.ranks[1]])
    assert third.stage is not other
