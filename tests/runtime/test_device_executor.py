"""The device's executor against that of the CPU: the same tokens whatever the order of streams and
threads, and not without each of its waits."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.messages import Register, RowLogprobs, Sampling
from gllm.runtime.cuda.graphs import DecodeGraphs
from gllm.runtime.cuda.plans import plan_tables
from gllm.runtime.executor import StageExecutor
from gllm.scheduler.plan import ON_DEVICE, Sampled, StepPlan
from tests.kernels import fake_flash_attention
from tests.runtime.device import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    as_on_a_device,
    executor_on,
    run_interleaved,
)
from tests.runtime.fake_streams import FakeQueues
from tests.runtime.memory_uses import Race
from tests.runtime.pipeline import GREEDY, Pipeline
from tests.tiny_models import save

PROMPTS = {1: [5, 9, 3, 7], 2: [11, 4, 8, 2, 6, 17], 3: [21, 30, 12], 4: [40, 41, 42, 43, 44, 45]}
DECODES = 5
STEPS = DECODES + 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: what is tested is around it."""
    made = save("llama3", tmp_path_factory.mktemp("llama3"), seed=0)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return made


def registered(**special: Sampling) -> list[Register]:
    """The sequences; `special`: sampling by name, as seq3."""
    return [
        Register(seq, len(prompt), prompt, special.get(f"seq{seq}", GREEDY))
        for seq, prompt in PROMPTS.items()
    ]


def plans_of(pipeline: Pipeline) -> list[StepPlan]:
    """Three prompts, decodes behind their own tokens, then another prompt beside them, which goes
    on with all; at last the first sequence has ended."""
    for seq, prompt in PROMPTS.items():
        pipeline.add(seq, prompt)
    step = pipeline.plan
    plans = [step([pipeline.row(seq, len(PROMPTS[seq])) for seq in (1, 2, 3)])]

    def decodes(*seqs: int) -> list:
        return [pipeline.row(seq, 1, token_ids=[ON_DEVICE]) for seq in seqs]

    plans += [step(decodes(1, 2, 3)) for _ in range(DECODES)]
    plans.append(step([*decodes(3, 1), pipeline.row(4, len(PROMPTS[4]))], [2]))
    plans.append(step(decodes(4, 1, 3), [1]))
    plans.append(step(decodes(3, 4), [3, 4]))
    return plans


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[StepPlan]:
    return plans_of(Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


def expected_of(
    folder: Path, plans: list[StepPlan], kv_cache_dtype: str = "auto", **special: Sampling
) -> list[list[Sampled]]:
    """What the CPU's executor samples."""
    shape = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    pipeline = Pipeline(folder, **shape, kv_cache_dtype=kv_cache_dtype)
    executor = pipeline.executors[0]
    for message in registered(**special):
        executor.register(message)
    results = []
    for plan in plans:
        batch = executor.prepare(plan)
        results.append(executor.sample(batch, executor.compute(batch, None))[0])
    return results


@pytest.fixture(scope="module")
def expected(folder: Path, plans: list[StepPlan]) -> list[list[Sampled]]:
    results = expected_of(folder, plans)
    drawn = [sampled.token for step in results for sampled in step]
    assert len(set(drawn)) > len(drawn) / 3, "tokens that tell steps apart"
    return results


def approximately(tree: Any) -> Any:
    """The tree, its floats compared with a tolerance."""
    if isinstance(tree, list):
        return [approximately(part) for part in tree]
    return pytest.approx(tree, abs=1e-4) if isinstance(tree, float) else tree


def run(
    folder: Path, plans: list[StepPlan], seed: int, graphs: int, **options: object
) -> tuple[list[list[Sampled]], FakeQueues]:
    special, given = options.pop("special", {}), options.pop("given", {})
    with as_on_a_device(), FakeQueues(seed, **options) as queues:  # type: ignore[arg-type]
        executor = executor_on(queues, folder, graphs=graphs, **given)  # type: ignore[arg-type]
        for message in registered(**special):  # type: ignore[arg-type]
            executor.register(message)
        results = run_interleaved(queues, executor, plans, seed)
        queues.synchronize()
        assert executor.host_seconds > 0
    return results, queues


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    graphs=st.sampled_from([0, 2, 4]),
    eager=st.sampled_from([0, 0.5, 0.9]),
)
def test_any_order_gives_the_tokens_of_the_cpu(
    folder: Path,
    plans: list[StepPlan],
    expected: list[list[Sampled]],
    seed: int,
    graphs: int,
    eager: float,
) -> None:
    results, _ = run(folder, plans, seed, graphs, eagerness=eager)
    assert results == expected


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each graph that was replayed."""
    sizes: list[int] = []
    replay = DecodeGraphs.replay

    def counted(graphs: DecodeGraphs, size: int) -> torch.Tensor:
        sizes.append(size)
        return replay(graphs, size)

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    return sizes


@pytest.mark.parametrize("seed", range(3))
def test_attention_by_torch_without_graphs(
    folder: Path,
    plans: list[StepPlan],
    expected: list[list[Sampled]],
    seed: int,
    replayed: list[int],
) -> None:
    """As on a GPU where kernels are under suspicion: gathers go there with a step's inputs."""
    given = {"plan": None, "attention_backend": "torch"}
    results, _ = run(folder, plans, seed, 4, given=given)
    assert results == expected
    assert replayed == []


@pytest.mark.parametrize("seed", range(3))
def test_attention_by_flash_attention_in_graphs(
    folder: Path,
    plans: list[StepPlan],
    expected: list[list[Sampled]],
    seed: int,
    replayed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables on the device are all that tells decodes apart."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attention)
    monkeypatch.setattr(fake_flash_attention, "PAGE", BLOCK_SIZE)
    monkeypatch.setattr(fake_flash_attention, "DTYPES", (torch.float32,))
    given = {"plan": partial(plan_tables, backend="flash-attn")}
    results, _ = run(folder, plans, seed, 4, given=given)
    assert results == expected
    assert len(replayed) == DECODES + 2


@pytest.mark.parametrize("graphs", [0, 4])
def test_a_cache_in_fp8(folder: Path, plans: list[StepPlan], graphs: int) -> None:
    expected = expected_of(folder, plans, kv_cache_dtype="fp8")
    results, _ = run(folder, plans, 0, graphs, given={"kv_cache_dtype": "fp8"})
    assert results == expected


def test_the_largest_step_leaves_room(folder: Path) -> None:
    """Its work is in order, and is done before the room is known."""
    with as_on_a_device(), FakeQueues(4) as queues:
        executor = executor_on(queues, folder)
        assert executor.room(0.5, BLOCK_SIZE) == 500


def test_a_device_tells_when_it_has_computed(folder: Path, plans: list[StepPlan]) -> None:
    with as_on_a_device(), FakeQueues(4, eagerness=0) as queues:
        executor = executor_on(queues, folder)
        for message in registered():
            executor.register(message)
        batch = executor.prepare(plans[0])
        executor.compute(batch, None)
        assert executor.finish(batch) > 20


def run_often(folder: Path, plans: list[StepPlan], ignored: str, **options: object) -> None:
    for seed in range(6):
        run(folder, plans, seed, 0, ignored=ignored, **options)


def test_no_wait_can_be_spared(
    folder: Path, plans: list[StepPlan], expected: list[list[Sampled]]
) -> None:
    _, queues = run(folder, plans, 0, 4)
    assert len(queues.waits) == 6
    for wait in queues.waits:
        with pytest.raises(Race):
            run_often(folder, plans, wait)


def test_without_a_wait_numbers_are_wrong(
    folder: Path, plans: list[StepPlan], expected: list[list[Sampled]]
) -> None:
    """Not only clocks say so. Wrong numbers may be indices beyond a tensor's end."""
    _, queues = run(folder, plans, 0, 4)

    def goes_wrong(wait: str, seed: int) -> bool:
        eagerness = (0, 0.5, 0.9)[seed % 3]
        try:
            results, _ = run(
                folder, plans, seed, 0, ignored=wait, checks=False, eagerness=eagerness
            )
        except (IndexError, RuntimeError):
            return True
        return results != expected

    for wait in queues.waits:
        assert any(goes_wrong(wait, seed) for seed in range(40)), wait


PENALIZED = Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)


def test_rows_that_the_host_draws(folder: Path, plans: list[StepPlan]) -> None:
    """Steps with one of them and without, each with the tokens of the one before; the waits of
    those steps can be spared as little."""
    special = {"seq2": PENALIZED, "seq4": PENALIZED}
    expected = expected_of(folder, plans, **special)
    assert expected != expected_of(folder, plans)
    results, queues = run(folder, plans, 1, 4, special=special)
    assert results == expected
    (wait,) = (each for each in queues.waits if each.startswith("executor.py"))
    with pytest.raises(Race):
        run_often(folder, plans, wait, special=special)


def test_log_probabilities_are_those_of_the_cpu(folder: Path) -> None:
    """Of a prompt in chunks and of what is drawn behind it."""
    sampling = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
    pipeline = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    pipeline.add(1, PROMPTS[4], sampling)
    plans = [
        pipeline.plan([pipeline.row(1, 4, samples=False)]),
        pipeline.plan([pipeline.row(1, 2)]),
    ]

    def answer(executor: StageExecutor) -> tuple[list[Sampled], list[RowLogprobs]]:
        for plan in plans:
            batch = executor.prepare(plan)
            results = executor.sample(batch, executor.compute(batch, None))
        return results

    told = [answer(pipeline.executors[0])]
    with as_on_a_device(), FakeQueues(2) as queues:
        executor = executor_on(queues, folder, graphs=2)
        executor.register(Register(1, len(PROMPTS[4]), PROMPTS[4], sampling))
        told.append(answer(executor))
    assert len(told[0][1][0].prompt) == len(PROMPTS[4]) - 1
    assert told[0][0] == told[1][0]
    assert msgspec.to_builtins(told[1][1]) == approximately(msgspec.to_builtins(told[0][1]))


def test_a_step_without_samples_draws_nothing(folder: Path) -> None:
    pipeline = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    pipeline.add(1, PROMPTS[4])
    with as_on_a_device(), FakeQueues(2) as queues:
        executor = executor_on(queues, folder)
        executor.register(registered()[0])
        plan = pipeline.plan([pipeline.row(1, 4, samples=False)])
        batch = executor.prepare(plan)
        assert executor.sample(batch, executor.compute(batch, None)) == ([], [])


def test_logits_that_are_not_finite_end_their_row_only(folder: Path) -> None:
    with as_on_a_device(), FakeQueues(2) as queues:
        executor = executor_on(queues, folder)
        for message in registered():
            executor.register(message)
        plan = plans_of(Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))[0]
        batch = executor.prepare(plan)
        compute = executor._stage.logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            logits[1, 7] = float("nan")
            return logits

        executor._stage.logits = broken  # type: ignore[method-assign]
        results, _ = executor.sample(batch, executor.compute(batch, None))
    assert [bool(result.error) for result in results] == [False, True, False]
    assert results[1].token == 0
