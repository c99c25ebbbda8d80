"""Stages on emulated devices: times of the cost model, tokens of a text, nothing computed."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gllm.config.emulation import EmulationConfig
from gllm.config.engine import EngineConfig
from gllm.config.sampling import StructuredOutput
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.emulation.device import EmulatedDevice
from gllm.runtime.emulation.model_folder import prepare_emulated_model
from gllm.runtime.emulation.output import EmulatedOutput
from gllm.runtime.worker.emulated.executor import EmulatedExecutor
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.stage import StageRunner
from gllm.scheduler.plan import SampledToken
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.sim.costs.base import ConstantCostModel, CostModel, TransferCost
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.hardware.stages import build_hardware
from gllm.transport.groups import StageGroups
from tests.runtime.worker.test_stage import FakeSender, Results
from tests.support.engines.pipeline import GREEDY, Held, Pipeline
from tests.support.models.thread_group import thread_groups
from tests.support.text.grammar_writing import (
    TOKENIZER,
    VOCABULARY,
    compiled_grammar,
)

EOS_IDS = (0, 2)
END = EOS_IDS[0]
"""Token that ends outputs of a length."""
PROMPT = TOKENIZER.encode("The pipeline moves", add_special_tokens=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_emulated_model("demo", tmp_path_factory.mktemp("emulated"))


@dataclass
class EmulatedPipeline(Pipeline):
    """Stages of the demo model on emulated devices."""

    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    cost: CostModel = field(default_factory=lambda: ConstantCostModel(0.0))
    speed: float = 1.0

    def create_executor(self, engine: EngineConfig, layers: range) -> Executor:
        engine = replace(engine, device="emulated", emulation=self.emulation)
        stage = layers.start * self.stages // self.config.model.num_layers
        device = EmulatedDevice(self.cost, stage, self.speed)
        return EmulatedExecutor(self.config, engine, self.stages, layers, device, weight_bytes=7)

    def recover(self, seq: int, sampling: SequenceSamplingParams = GREEDY) -> None:
        """Register a sequence again with its output, as after the death of a worker."""
        held = self.held[seq]
        prompt, output = held.tokens[: held.prompt_len], held.tokens[held.prompt_len :]
        message = RegisterSequences(seq, len(prompt), prompt, sampling, outputs=[output])
        for executor in self.executors:
            executor.prepare(self.plan([], [seq]))
            executor.register(message)
        self.held[seq] = Held(len(prompt), held.tokens)

    def generate(self, seq: int, count: int) -> list[int]:
        """The next tokens of a sequence."""
        held = self.held[seq]
        before = len(held.tokens)
        while len(held.tokens) < before + count:
            self.run([self.row(seq, len(held.tokens) - held.computed)])
        return held.tokens[before:]


class ReturningCost(ConstantCostModel):
    """Steps take no time, but results do."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0.0)
        self._seconds = seconds

    def return_transfer(self, work: StageWork) -> TransferCost:
        return TransferCost(0.0, self._seconds)


def chosen(folder: Path, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The text that a request without further fields has."""
    output = EmulatedOutput(EmulationConfig(**options), folder, EOS_IDS, VOCABULARY)
    text = output.create_text(prompt, 0)
    return [text.token(index) for index in range(count)]


# Tokens.


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_after_preemptions_and_recoveries(folder: Path, seed: int) -> None:
    """However the prompt and the output are divided into steps."""
    rng = random.Random(seed)
    pipeline = EmulatedPipeline(folder, stages=1 + seed % 3, num_blocks=4096)
    prompts = {
        seq: [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 40))] for seq in range(3)
    }
    for seq, prompt in prompts.items():
        pipeline.add(seq, prompt)
    for _ in range(60):
        rows = []
        for seq, held in pipeline.held.items():
            match rng.randrange(12):
                case 0:
                    pipeline.preempt(seq)
                case 1:
                    pipeline.recover(seq)
                    held = pipeline.held[seq]
            remaining = len(held.tokens) - held.computed
            count = rng.randint(1, remaining)
            rows.append(pipeline.row(seq, count, samples=count == remaining))
        pipeline.run(rows)
    for seq, prompt in prompts.items():
        tokens = pipeline.held[seq].tokens[len(prompt) :]
        assert len(tokens) > 5
        assert tokens == chosen(folder, prompt, len(tokens))


def test_choices_of_a_request_have_texts_of_their_own(folder: Path) -> None:
    pipeline = EmulatedPipeline(folder)
    pipeline.held = {seq: Held(len(PROMPT), [*PROMPT]) for seq in (4, 5)}
    pipeline.executors[0].register(RegisterSequences(4, len(PROMPT), PROMPT, GREEDY, n=2))
    assert pipeline.generate(4, 8) == chosen(folder, PROMPT, 8)
    assert pipeline.generate(5, 8) != chosen(folder, PROMPT, 8)


def add_row(folder: Path, emulation: EmulationConfig | None = None, **fields: Any) -> Any:
    """A pipeline with a plain sequence 0, and a sequence 1 whose request has some fields."""
    pipeline = EmulatedPipeline(folder, stages=2, emulation=emulation or EmulationConfig())
    pipeline.add(0, PROMPT)
    pipeline.add(1, PROMPT, SequenceSamplingParams(**{"temperature": 0.0, **fields}))
    return pipeline


def run_both(pipeline: Any, count: int) -> tuple[list[int], list[int]]:
    """Output of both sequences, computed in the same steps."""
    for _ in range(count):
        held = pipeline.held.items()
        pipeline.run([pipeline.row(seq, len(each.tokens) - each.computed) for seq, each in held])
    plain, other = (pipeline.held[seq].tokens[len(PROMPT) :] for seq in (0, 1))
    return plain, other


def test_log_probabilities(folder: Path) -> None:
    pipeline = add_row(folder, logprobs=3, prompt_logprobs=2)
    plain, tokens = run_both(pipeline, 4)
    assert plain == tokens == chosen(folder, PROMPT, 4)
    assert [detail.seq for detail in pipeline.logprobs] == [1] * 4
    for detail, token in zip(pipeline.logprobs, tokens, strict=True):
        assert (detail.sampled.token, detail.sampled.rank) == (token, 1)
        assert detail.sampled.logprob == pytest.approx(0.0, abs=1e-3)
        assert len(detail.sampled.top_ids) == 3
    first, *others = (detail.prompt_logprobs for detail in pipeline.logprobs)
    assert [score.token for score in first] == PROMPT[1:]
    equal = -math.log(VOCABULARY)
    assert [score.logprob for score in first] == pytest.approx([equal] * (len(PROMPT) - 1))
    assert others == [[]] * 3


def test_embeddings_have_their_size(folder: Path) -> None:
    pipeline = add_row(folder, embeds=True)
    run_both(pipeline, 1)
    (detail,) = pipeline.logprobs
    hidden_size = pipeline.config.model.hidden_size
    assert np.frombuffer(detail.embedding, "<f4").tolist() == [0.0] * hidden_size


def test_a_forbidden_end_is_replaced_by_the_text(folder: Path) -> None:
    fixed = EmulationConfig(emulated_output="fixed:3")
    plain, tokens = run_both(add_row(folder, fixed, min_tokens=6, banned=EOS_IDS), 8)
    text = chosen(folder, PROMPT, 8)
    assert plain == [*text[:2], *[END] * 6]
    assert tokens == [*text[:6], END, END]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_and_allowed_tokens_decide(folder: Path, temperature: float) -> None:
    text = chosen(folder, PROMPT, 4)
    bias = add_row(folder, logit_bias={77: 100.0}, temperature=temperature)
    assert run_both(bias, 4) == (text, [77] * 4)
    _, tokens = run_both(add_row(folder, allowed=(78, 79), temperature=temperature), 4)
    assert set(tokens) <= {78, 79}
    # Nothing special comes where the text may not.
    banned = add_row(folder, logit_bias=dict.fromkeys(text, -100.0), temperature=temperature)
    _, tokens = run_both(banned, 4)
    assert not TOKENIZER.special_token_ids.intersection(tokens)


def test_seeds_decide_where_the_text_may_not_be(folder: Path) -> None:
    text = chosen(folder, PROMPT, 6)
    outputs = []
    for seed in (5, 5, 6):
        bias = dict.fromkeys(text, -100.0)
        pipeline = add_row(folder, logit_bias=bias, temperature=1.0, seed=seed)
        outputs.append(run_both(pipeline, 6)[1])
    assert outputs[0] == outputs[1] != outputs[2]


PERSON = StructuredOutput(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "age": {"type": "integer"},
            "size": {"type": "number"},
            "parent": {"type": "object"},
        },
        "required": ["name", "tags", "age", "size", "parent"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("output", ["limit", "fixed:5"])
def test_structured_outputs_end_and_are_valid(
    folder: Path, temperature: float, output: str
) -> None:
    """Although the text would be a string without an end, or ends before the grammar allows it."""
    pipeline = add_row(
        folder,
        EmulationConfig(emulated_output=output),
        grammar=compiled_grammar(PERSON),
        temperature=temperature,
    )
    held = pipeline.held[1]
    while held.tokens[-1] not in EOS_IDS:
        assert len(held.tokens) < 400
        (result,) = pipeline.run([pipeline.row(1, len(held.tokens) - held.computed)])
        assert not result.error
        held.tokens += result.further_token_ids
    text = TOKENIZER.decode(held.tokens[len(PROMPT) : -1])
    person = json.loads(text)
    assert len(person["tags"]) >= 2
    assert isinstance(person["age"], int)
    for executor in pipeline.executors:
        executor.close()


# Times.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bytes", [True, False])
def test_activations_have_the_end_of_their_step(folder: Path, dtype: str, has_bytes: bool) -> None:
    """In their real size or in that of a header; the link takes its time from then on."""
    cost = ConstantCostModel(stage=0.002, link=0.005)
    emulation = EmulationConfig(emulated_bytes=has_bytes)
    pipeline = EmulatedPipeline(folder, 2, dtype=dtype, emulation=emulation, cost=cost)
    first, last = pipeline.executors
    pipeline.add(1, PROMPT)
    for tokens in (len(PROMPT) - 1, 1):
        plan = pipeline.plan([pipeline.row(1, tokens)])
        batches = [executor.prepare(plan) for executor in (first, last)]
        hidden = first.compute(batches[0], None)
        width = pipeline.config.model.hidden_size if has_bytes else first.activation_width
        assert first.activation_width == width <= pipeline.config.model.hidden_size
        assert (hidden.shape, hidden.dtype) == ((tokens, width), first.dtype)
        _, sent = first.span(batches[0], 0.0, 0.0)
        last.compute(batches[1], hidden.clone())
        begin, end = last.span(batches[1], 0.0, 0.0)
        # On a busy machine the plan may be there later than the activations.
        ready = max(sent + 0.005, batches[1].device_state.planned_at)
        assert (begin, end) == pytest.approx((ready, ready + 0.002), abs=1e-9)


def test_activations_without_a_time_are_those_of_now(folder: Path) -> None:
    pipeline = EmulatedPipeline(folder, 2, cost=ConstantCostModel(stage=0.001, link=0.005))
    pipeline.add(1, PROMPT)
    plan = pipeline.plan([pipeline.row(1, len(PROMPT))])
    last = pipeline.executors[1]
    batch = last.prepare(plan)
    before = time.monotonic()
    last.compute(batch, torch.full((len(PROMPT), last.activation_width), math.nan))
    begin, _ = last.span(batch, 0.0, 0.0)
    assert before <= begin <= time.monotonic()


class Runner:
    """A real stage on threads, whose plans a test makes."""

    def __init__(self, pipeline: EmulatedPipeline, **ends: Any) -> None:
        self.results = Results()
        self.pipeline = pipeline
        executor = pipeline.executors[0]
        assert isinstance(executor, EmulatedExecutor)
        self.executor = executor
        self.stage = StageRunner(
            self.executor,
            [],
            [ends["sender"]] if ends else [],
            self.results.queue.put_nowait,  # type: ignore[arg-type]
            self.results.faults.append,
        )


async def test_times_are_exactly_those_of_the_cost_model(folder: Path) -> None:
    """Of mixed steps, one after another; the host's own time is lateness."""
    hardware = build_hardware("qwen2.5-7b", "L20", 1)
    cost, speed = RooflineCostModel(hardware), 10.0
    runner = Runner(EmulatedPipeline(folder, cost=cost, speed=speed, num_blocks=512))
    pipeline, executor = runner.pipeline, runner.executor
    plans = []
    for seq in range(6):
        pipeline.add(seq, PROMPT * (1 + seq))
        rows = [pipeline.row(seq, len(PROMPT) * (1 + seq))]
        for other in range(seq):
            pipeline.held[other].tokens.append(5)
            rows.append(pipeline.row(other, 1))
        plans.append(pipeline.plan(rows))
    planned_at = time.monotonic()
    for plan in plans:
        runner.stage.run_plan(plan)
    results = await runner.results.take(len(plans))
    assert [result.step for result in results] == [plan.step for plan in plans]
    tokens = [token for result in results for token in result.sampled_tokens]
    assert all(isinstance(token, SampledToken) and not token.error for token in tokens)
    times, until = runner.stage.pop_step_times()
    free_at = planned_at
    for plan, span in zip(plans, times, strict=True):
        seconds = cost.stage_seconds(0, compute_stage_work(plan.step, plan.rows)) / speed
        assert span.end - span.start == pytest.approx(seconds, abs=1e-9)
        assert span.start >= free_at
        free_at = span.end
    assert runner.stage.busy_seconds == pytest.approx(
        sum(span.end - span.start for span in times), abs=1e-9
    )
    # No step is left, and none can begin before now.
    assert until > times[-1].end
    # Each step may be late by all of the time since the plans.
    assert 0.0 < executor.late_seconds < len(plans) * (time.monotonic() - planned_at)
    await asyncio.to_thread(runner.stage.close)
    assert not runner.results.faults


async def test_a_report_covers_no_step_that_has_begun(folder: Path) -> None:
    """A step begins on the device at the end of the one before, earlier than on the host."""
    runner = Runner(EmulatedPipeline(folder, cost=ConstantCostModel(stage=0.002), num_blocks=512))
    runner.pipeline.add(1, PROMPT * 8)
    num_steps = 8 * len(PROMPT) - 1
    for _ in range(num_steps):
        runner.stage.run_plan(runner.pipeline.plan([runner.pipeline.row(1, 1, samples=False)]))
    complete_until = -math.inf
    starts: list[float] = []
    while len(starts) < num_steps:
        times, until = runner.stage.pop_step_times()
        assert all(span.start >= complete_until for span in times)
        starts += [span.start for span in times]
        assert until >= complete_until
        complete_until = until
        await asyncio.sleep(0.001)
    await asyncio.to_thread(runner.stage.close)


@pytest.mark.parametrize(("is_remote", "seconds"), [(False, 0.05), (True, 600.0)])
def test_results_take_as_long_as_their_link(folder: Path, is_remote: bool, seconds: float) -> None:
    """Unless they cross a real one."""
    pipeline = EmulatedPipeline(folder, stages=2, cost=ReturningCost(seconds))
    executor = pipeline.executors[1]
    assert isinstance(executor, EmulatedExecutor)
    executor._returns_remotely = is_remote
    pipeline.add(1, PROMPT)
    begin = time.monotonic()
    pipeline.run([pipeline.row(1, len(PROMPT))])
    assert (time.monotonic() - begin >= seconds) != is_remote


def test_lateness_is_counted_and_does_not_move_the_timeline(folder: Path) -> None:
    pipeline = EmulatedPipeline(folder, cost=ConstantCostModel(stage=0.001))
    pipeline.add(1, PROMPT)
    (executor,) = pipeline.executors
    assert isinstance(executor, EmulatedExecutor)
    before = time.monotonic()
    batch = executor.prepare(pipeline.plan([pipeline.row(1, len(PROMPT))]))
    planned_at = time.monotonic()
    time.sleep(0.01)
    executor.compute(batch, None)
    begin, end = executor.span(batch, before, time.monotonic())
    assert before <= begin <= planned_at
    assert end == pytest.approx(begin + 0.001)
    assert executor.late_seconds >= 0.009


@pytest.mark.parametrize("create_sender", [None, FakeSender])
async def test_a_stage_is_closed_during_a_long_step(
    folder: Path, create_sender: Callable[[], FakeSender] | None
) -> None:
    """Its step would end in ten minutes; nothing of it is reported or sent."""
    cost = ConstantCostModel(stage=600.0)
    ends = {} if create_sender is None else {"sender": create_sender()}
    runner = Runner(EmulatedPipeline(folder, 2 if ends else 1, cost=cost), **ends)
    runner.pipeline.add(1, PROMPT)
    for _ in range(2):
        runner.stage.run_plan(runner.pipeline.plan([runner.pipeline.row(1, 1)]))
    while runner.stage.step_under_way is None:
        await asyncio.sleep(0.001)
    await asyncio.wait_for(asyncio.to_thread(runner.stage.close), 60)
    assert runner.results.queue.empty()
    assert not runner.results.faults
    assert all(sender.sent == [] for sender in ends.values())


async def test_ranks_of_a_stage_agree_on_its_steps(folder: Path) -> None:
    """Rank 0 alone samples; each has the times of the stage."""
    pipeline = EmulatedPipeline(folder)
    config = pipeline.config
    engine = EngineConfig(device="emulated", dtype="float32", tensor_parallel_size=(2,))
    results = [Results(), Results()]
    faults: list[BaseException] = []
    runners = []
    ends = zip(thread_groups(2), thread_groups(2), strict=True)
    for rank, groups in enumerate(map(StageGroups._make, ends)):
        device = EmulatedDevice(ConstantCostModel(0.001), 0)
        layers = range(config.model.num_layers)
        executor = EmulatedExecutor(config, engine, 1, layers, device, 7, rank=rank, num_ranks=2)
        executor.load(folder, lambda done, total: None)
        executor.join(groups)
        executor.register(RegisterSequences(1, len(PROMPT), PROMPT, GREEDY))
        add = results[rank].queue.put_nowait
        runners.append(StageRunner(executor, [], [], add, faults.append, groups=groups))  # type: ignore[arg-type]
    pipeline.add(1, PROMPT)
    plans = [pipeline.plan([pipeline.row(1, 1)]) for _ in PROMPT]
    for plan in plans:
        for runner in runners:
            runner.run_plan(plan)
    steps = [result.step for result in await results[0].take(len(plans))]
    assert steps == [plan.step for plan in plans]
    while any(runner.is_busy for runner in runners):
        await asyncio.sleep(0.001)
    assert results[1].queue.empty()
    for runner in runners:
        assert [span.step for span in runner.pop_step_times()[0]] == steps
    await asyncio.gather(*(asyncio.to_thread(runner.close) for runner in runners))
    assert not faults


# The executor's other duties.


def test_weights_are_counted_and_caches_are_not_allocated(folder: Path) -> None:
    pipeline = EmulatedPipeline(folder, stages=2)
    for executor in pipeline.executors:
        executor.allocate(10**12, 16)
        assert executor.weight_bytes == 7
        assert executor.kv_numerics == (
            "emulated; torch.float32, KV cache torch.float32, real entries"
        )
        assert executor.numerics == f"emulated; {executor.kv_numerics}; output passage, limit"
    pipeline.add(1, PROMPT)
    pipeline.generate(1, 2)
    for executor in pipeline.executors:
        assert executor.held_seqs == {1}
        executor.prepare(pipeline.plan([], [1]))
        assert executor.held_seqs == set()
        executor.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sizes_are_those_of_the_checkpoint_s_dtype(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Whatever this host would compute with."""
    config = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    (executor,) = EmulatedPipeline(tmp_path, dtype="auto").executors
    assert executor.dtype == executor.cache_dtype == getattr(torch, dtype)
