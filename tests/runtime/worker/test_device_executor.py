"""The device's executor against that of the CPU: the same tokens whatever the order of streams and
threads, and not without each of its waits."""

from array import array
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.kernels import sampling
from gllm.kernels.logprobs import LogprobTensors
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker import logit_edits as static_edits
from gllm.runtime.worker.cuda import sampler
from gllm.runtime.worker.cuda.graphs import plan_table_attention
from gllm.runtime.worker.executor import Executor
from gllm.scheduler.plan import ON_DEVICE, StepPlan
from tests.support.engines.pipeline import GREEDY, Pipeline
from tests.support.examples import num_examples
from tests.support.full_cases import full_but
from tests.support.gpu import fake_flash_attention
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Answer,
    as_on_a_device,
    executor_on,
    run_interleaved,
)
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import HiddenSync, Race

PROMPTS = {1: [5, 9, 3, 7], 2: [11, 4, 8, 2, 6, 17], 3: [21, 30, 12], 4: [40, 41, 42, 43, 44, 45]}
DECODES = 5
STEPS = DECODES + 4


def registered(**special: SequenceSamplingParams) -> list[RegisterSequences]:
    """The sequences; `special`: sampling by name, as seq3."""
    return [
        RegisterSequences(seq, len(prompt), prompt, special.get(f"seq{seq}", GREEDY))
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
    plans.append(step(decodes(4, 1, 3)))
    plans.append(step(decodes(3, 4), [1]))
    return plans


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[StepPlan]:
    return plans_of(Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


def expected_of(
    folder: Path,
    plans: list[StepPlan],
    special: dict[str, SequenceSamplingParams],
    kv_cache_dtype: str = "auto",
) -> list[Answer]:
    """What the CPU's executor samples and tells."""
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    pipeline = Pipeline(folder, **shape, kv_cache_dtype=kv_cache_dtype)
    executor = pipeline.executors[0]
    for message in registered(**special):
        executor.register(message)
    results = []
    for plan in plans:
        batch = executor.prepare(plan)
        results.append(executor.sample(batch, executor.compute(batch, None)))
    return results


PENALIZED = SequenceSamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=1.5, frequency_penalty=0.5
)
EVERYTHING = SequenceSamplingParams(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    seed=5,
    min_tokens=3,
    banned=(7, 8, 10**6),
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    logit_bias={3: 2.0, 9: -1.0},
    allowed=tuple(range(2, 60)),
    bad_words=((5,), (3, 4), *((any_, 9) for any_ in range(40))),
    logprobs=3,
)
EMBEDDING = SequenceSamplingParams(temperature=0, embeds=True)
SPECIALS: dict[str, dict[str, SequenceSamplingParams]] = {
    "greedy": {},
    "random": {
        "seq1": SequenceSamplingParams(temperature=0.9, top_k=7, seed=1),
        "seq2": SequenceSamplingParams(seed=2),
        "seq3": SequenceSamplingParams(temperature=1.2, top_p=0.8, seed=3),
        "seq4": SequenceSamplingParams(min_p=0.02, seed=4),
    },
    "embeddings": {"seq1": EMBEDDING, "seq3": EMBEDDING, "seq4": EMBEDDING},
    "penalties": {"seq2": PENALIZED, "seq4": PENALIZED},
    "everything": {
        "seq1": EVERYTHING,
        "seq3": msgspec.structs.replace(EVERYTHING, seed=6, bad_words=(), prompt_logprobs=2),
        "seq4": SequenceSamplingParams(
            temperature=0.0, logprobs=0, prompt_logprobs=4, allowed=(4, 9)
        ),
    },
}
"""Sampling by sequence; others are greedy."""


@pytest.fixture(scope="module")
def expected(folder: Path, plans: list[StepPlan]) -> dict[str, list[Answer]]:
    """By name of what is special."""
    made = {name: expected_of(folder, plans, special) for name, special in SPECIALS.items()}
    for name, results in made.items():
        drawn = [sampled.token_id for step, _ in results for sampled in step]
        assert len(set(drawn)) > len(drawn) / 4, "tokens that tell steps apart"
        assert name == "greedy" or results != made["greedy"]
    return made


def approximately(tree: Any) -> Any:
    """The tree, its floats compared with a tolerance."""
    if isinstance(tree, list):
        return [approximately(part) for part in tree]
    return pytest.approx(tree, abs=1e-4) if isinstance(tree, float) else tree


def check(results: list[Answer], expected: list[Answer]) -> None:
    """The same tokens; log-probabilities with a tolerance."""
    assert [step for step, _ in results] == [step for step, _ in expected]
    told = [
        [plainly(row) for _, told in answers for row in told] for answers in (results, expected)
    ]
    assert told[0] == approximately(told[1])


def plainly(row: SampleDetails) -> Any:
    """What a row tells, its embedding as numbers."""
    vector = array("f", row.embedding).tolist()
    return [msgspec.to_builtins(msgspec.structs.replace(row, embedding=b"")), vector]


def run(
    folder: Path, plans: list[StepPlan], seed: int, graphs: int, **options: Any
) -> tuple[list[Answer], FakeQueues]:
    special, given = options.pop("special", {}), options.pop("given", {})
    examples = options.pop("examples", False)
    with as_on_a_device(), FakeQueues(seed, **options) as queues:
        executor = executor_on(queues, folder, graphs=graphs, **given)
        if examples:
            executor.warm_up()
        for message in registered(**special):
            executor.register(message)
        queues.host_waits.clear()
        results = run_interleaved(queues, executor, plans, seed)
        made = queues.host_waits.copy()
        queues.synchronize()
        queues.host_waits = made
        assert executor.host_seconds > 0
    return results, queues


def test_example_steps_before_the_first_leave_nothing_behind(
    folder: Path, plans: list[StepPlan], expected: dict[str, list[Answer]]
) -> None:
    results, _ = run(folder, plans, 3, 4, special=SPECIALS["everything"], examples=True)
    check(results, expected["everything"])


# The tests of single settings below reach the same lines.
@pytest.mark.no_cover
@settings(
    max_examples=num_examples(6, 60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(sorted(SPECIALS)),
    seed=st.integers(0, 2**32),
    graphs=st.sampled_from([0, 2, 4]),
    eager=st.sampled_from([0, 0.5, 0.9]),
)
def test_any_order_gives_what_the_cpu_gives(
    folder: Path,
    plans: list[StepPlan],
    expected: dict[str, list[Answer]],
    name: str,
    seed: int,
    graphs: int,
    eager: float,
) -> None:
    special = SPECIALS[name]
    results, _ = run(folder, plans, seed, graphs, eagerness=eager, special=special)
    check(results, expected[name])


@pytest.mark.parametrize("name", full_but(("embeddings", "everything"), SPECIALS))
def test_no_step_waits_but_for_its_tokens(folder: Path, plans: list[StepPlan], name: str) -> None:
    """Whatever its rows ask, with a device that does nothing until somebody waits: who builds steps
    waits for nothing, who puts them into streams for memory of the host alone to be refilled."""
    _, queues = run(folder, plans, 3, 4, eagerness=0, special=SPECIALS[name])
    by_thread = {
        thread: {place.split(":")[0] for other, place in queues.host_waits if other == thread}
        for thread, _ in queues.host_waits
    }
    assert by_thread == {"compute": {"staging.py"}, "sample": {"readback.py"}}
    assert len(queues.host_waits) == 2


def test_all_steps_can_be_put_into_streams_before_the_first_has_begun(folder: Path) -> None:
    """As far as staging has buffers: drawing looks at nothing on the way."""
    pipeline = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    plans = plans_of(pipeline)[:2]
    with as_on_a_device(), FakeQueues(1, eagerness=0) as queues:
        executor = executor_on(queues, folder)
        for message in registered(**SPECIALS["everything"]):
            executor.register(message)
        queues.host_waits.clear()
        batches = [executor.prepare(plan) for plan in plans]
        tokens = [executor.compute(batch, None) for batch in batches]
        ends = [batch.device_state.spans[-1][1] for batch in batches]
        assert not any(event.reached[0] for event in ends)
        results = [executor.sample(*step) for step in zip(batches, tokens, strict=True)]
    check(results, expected_of(folder, plans, SPECIALS["everything"]))


def with_item(logits: torch.Tensor) -> torch.Tensor:
    finite = sampling.find_finite_rows(logits)
    assert finite.all()
    return finite


def by_condition(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    chosen = places[values != 0]
    logits.view(-1).index_add_(0, chosen, values[values != 0])


def in_full(scores: LogprobTensors) -> torch.Tensor:
    return torch.tensor(scores.logprobs.tolist())


def with_a_list(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    for row in rows.tolist():
        logits[row] = 0


def where_it_is(logits: torch.Tensor, table: torch.Tensor, *rest: object) -> None:
    logits[0, table.nonzero()[0]] = 0


@pytest.mark.parametrize(
    ("module", "name", "waiting"),
    [
        (sampler, "find_finite_rows", with_item),
        (sampler, "pack_logprobs", in_full),
        (sampler, "sample", sampling.sample),
        (static_edits, "add_to_logits", by_condition),
        (static_edits, "apply_token_bitmask", with_a_list),
        (sampler, "apply_history_penalties", where_it_is),
    ],
)
def test_an_operation_that_waits_is_found(
    folder: Path, plans: list[StepPlan], module: Any, name: str, waiting: Any
) -> None:
    """Each in the place of the one that does not."""
    with as_on_a_device(), FakeQueues(2) as queues, pytest.MonkeyPatch.context() as patch:
        executor = executor_on(queues, folder)
        for message in registered(**SPECIALS["everything"]):
            executor.register(message)
        patch.setattr(module, name, waiting)
        batch = executor.prepare(plans[0])
        with pytest.raises(HiddenSync):
            executor.compute(batch, None)


@pytest.mark.parametrize("seed", full_but([0], range(3)))
def test_attention_by_torch_without_graphs(
    folder: Path,
    plans: list[StepPlan],
    expected: dict[str, list[Answer]],
    seed: int,
) -> None:
    """As on a GPU where kernels are under suspicion: gathers go there with a step's inputs."""
    given = {"plan": None, "attention_backend": "torch"}
    results, queues = run(folder, plans, seed, 4, given=given)
    check(results, expected["greedy"])
    assert queues.num_replays == 0


@pytest.mark.parametrize("seed", full_but([0], range(3)))
def test_attention_by_flash_attention_in_graphs(
    folder: Path,
    plans: list[StepPlan],
    expected: dict[str, list[Answer]],
    seed: int,
) -> None:
    """Tables on the device are all that tells decodes apart."""
    given = {"plan": partial(plan_table_attention, backend="flash-attn")}
    with fake_flash_attention.installed(BLOCK_SIZE, [torch.float32]):
        results, queues = run(folder, plans, seed, 4, given=given)
    check(results, expected["greedy"])
    assert queues.num_replays == DECODES + 2


@pytest.mark.parametrize("graphs", full_but([4], [0, 4]))
def test_a_cache_in_fp8(folder: Path, plans: list[StepPlan], graphs: int) -> None:
    expected = expected_of(folder, plans, {}, kv_cache_dtype="fp8")
    results, _ = run(folder, plans, 0, graphs, given={"kv_cache_dtype": "fp8"})
    check(results, expected)


def test_the_largest_step_leaves_room(folder: Path) -> None:
    """Its work is in order, and is done before the room is known."""
    with as_on_a_device(), FakeQueues(4) as queues:
        executor = executor_on(queues, folder)
        assert executor.available_bytes(0.5, BLOCK_SIZE, 0) == 500


def test_a_device_tells_when_it_has_computed(folder: Path, plans: list[StepPlan]) -> None:
    with as_on_a_device(), FakeQueues(4, eagerness=0) as queues:
        executor = executor_on(queues, folder)
        for message in registered():
            executor.register(message)
        batch = executor.prepare(plans[0])
        executor.compute(batch, None)
        assert executor.wait(batch).busy > 20


def run_often(folder: Path, plans: list[StepPlan], ignored: str, **options: object) -> None:
    for seed in range(6):
        run(folder, plans, seed, 0, ignored=ignored, **options)


@pytest.mark.parametrize("name", full_but(["everything"], ["greedy", "everything"]))
def test_no_wait_can_be_spared(folder: Path, plans: list[StepPlan], name: str) -> None:
    _, queues = run(folder, plans, 0, 4, special=SPECIALS[name])
    assert len(queues.waits) == 6
    for wait in queues.waits:
        with pytest.raises(Race):
            run_often(folder, plans, wait, special=SPECIALS[name])


@pytest.mark.full
@pytest.mark.no_cover
def test_without_a_wait_numbers_are_wrong(
    folder: Path, plans: list[StepPlan], expected: dict[str, list[Answer]]
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
        return results != expected["greedy"]

    for wait in queues.waits:
        assert any(goes_wrong(wait, seed) for seed in range(40)), wait


def test_log_probabilities_are_those_of_the_cpu(folder: Path) -> None:
    """Of a prompt in chunks and of what is drawn behind it."""
    sampling = SequenceSamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
    pipeline = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    pipeline.add(1, PROMPTS[4], sampling)
    plans = [
        pipeline.plan([pipeline.row(1, 4, samples=False)]),
        pipeline.plan([pipeline.row(1, 2)]),
    ]

    def answer(executor: Executor) -> Answer:
        for plan in plans:
            batch = executor.prepare(plan)
            results = executor.sample(batch, executor.compute(batch, None))
        return results

    told = [answer(pipeline.executors[0])]
    with as_on_a_device(), FakeQueues(2) as queues:
        executor = executor_on(queues, folder, graphs=2)
        executor.register(RegisterSequences(1, len(PROMPTS[4]), PROMPTS[4], sampling))
        told.append(answer(executor))
    assert len(told[0][1][0].prompt_logprobs) == len(PROMPTS[4]) - 1
    check([told[1]], [told[0]])


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
        compute = executor.stage.compute_logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            logits[1, 7] = float("nan")
            return logits

        executor.stage.compute_logits = broken  # type: ignore[method-assign]
        results, _ = executor.sample(batch, executor.compute(batch, None))
    assert [bool(result.error) for result in results] == [False, True, False]
    assert results[1].token_id == 0
