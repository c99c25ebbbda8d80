"""gllm's engine without its processes: scheduler and executor in one, as a worker drives them.

Owns the loop, the figures of decodes and prefill, and the rows of one model, transformers' and the
agreement's among them. What these compute is in peers.py and agreement.py.
"""

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu import agreement, models, peers
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, Named, Skip
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.batch import Batch
from gllm.runtime.executor import DeviceTime
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

T = TypeVar("T")

BUSY, WEIGHTS, MATRIX = 0.95, 0.8, 0.6
"""Aims: share of a decode run that the device computes; weight bytes / bandwidth of a step at batch
1 (1 / 1.25); of the matrix rate in prefill."""
READY = "ready"
SETTLING = 3
"""Decode steps at the beginning of a run that are not counted, and the last one."""
PREFILLS = 5


class NotMade(Exception):
    """Something that several rows need could not be made."""


class Loads(NamedTuple):
    """What is asked of a model."""

    batches: tuple[int, ...]
    prompt: int
    """Tokens of each prompt of a decode run."""
    new: int
    """Tokens that each generates in gllm's."""
    peer_new: int
    """In transformers'."""
    prefills: tuple[int, ...]
    positions: int
    """Of the teacher-forced agreement."""
    longest: int
    continuous: tuple[int, ...]
    """Batches of transformers' continuous batching, of which every run takes seconds to begin."""


REAL = Loads((1, 8, 64, 256), 256, 72, 16, (2048, 512), 512, 4096, (256, 1, 64, 8))
DRY = Loads((1, 3), 7, 9, 3, (24,), 24, 64, (3,))


class Step(NamedTuple):
    """One step that is over."""

    plan: StepPlan
    batch: Batch
    spent: DeviceTime
    committed: float
    """When its tokens were known, by time.perf_counter."""

    @property
    def is_decode(self) -> bool:
        return all(row.num_tokens == 1 for row in self.plan.rows)


@dataclass
class Model:
    """One model, its weights and both engines for them; each is made when it is asked for."""

    place: Place
    name: str
    options: dict[str, str]
    folder: Path
    """Made here; of its configuration."""
    graphs: bool
    """Whether decodes are to be recorded."""

    def __post_init__(self) -> None:
        self.loads = DRY if self.place.is_dry else REAL
        self.config = models.config_of(self.name, self.place.is_dry)
        self.folder.mkdir(parents=True, exist_ok=True)
        models.write_config(self.config, self.folder)
        self._next = 0
        self._made: dict[str, Any] = {}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """By their names in checkpoints."""
        return models.random_weights(self.place, self.config)

    @property
    def peer(self) -> peers.Peer:
        """transformers' model, on the very same weights."""
        return self._once("peer", lambda: peers.Peer(self.place, self.folder, self.weights))

    @property
    def truth(self) -> agreement.Truth:
        """What transformers computes of a text; asked for before gllm takes the weights, of which
        it marks some."""
        return self._once("truth", self._make_truth)

    @property
    def executor(self) -> models.Executor:
        """gllm's."""
        return self._once("executor", self._make_executor)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What was made of this name, or raises what kept it from being made: either takes long."""
        if name not in self._made:
            try:
                self._made[name] = make()
            except Exception as error:
                # Without the frames of the first, which hold memory of the device.
                kept = Skip(str(error)) if isinstance(error, Skip) else NotMade(f"{name}: {error}")
                kept.add_note(traceback.format_exc())
                self._made[name] = kept
        made = self._made[name]
        if isinstance(made, Exception):
            raise made
        return made

    def _make_truth(self) -> agreement.Truth:
        return agreement.truth_of(self.peer, self.weights, self.loads.positions)

    def _make_executor(self) -> models.Executor:
        with suppress(Exception):
            # Rows of the agreement tell what went wrong with it.
            self.truth  # noqa: B018
        sizes = self.blocks, self.loads.longest
        given = self.place, self.folder, self.weights, *sizes, self.options, self.graphs
        made = models.executor_of(*given)
        # As a worker does: what is there stays, and the collector need not walk through it.
        gc.collect()
        gc.freeze()
        return made

    @property
    def blocks(self) -> int:
        """That the largest load needs."""
        loads, batch = self.loads, max(self.loads.batches)
        one = -(-max(loads.longest, loads.prompt + self.new(batch) + 1) // models.BLOCK_SIZE)
        each = -(-(loads.prompt + self.new(batch) + 1) // models.BLOCK_SIZE)
        return max(2 * one, (batch + 1) * (each + 1) * 5 // 4)

    def new(self, batch: int) -> int:
        """Tokens that each of `batch` texts generates, so that enough steps have all of them: they
        begin to decode as their prompts are through, one step's worth after the other."""
        return self.loads.new + -(-batch * self.loads.prompt // models.BATCHED)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random ones."""
        return torch.randint(0, self.config["vocab_size"], (count, length)).tolist()

    def run(self, prompts: Sequence[list[int]], new: int) -> list[Step]:
        """Greedy texts of `new` tokens, all prompts at once.

        With async scheduling a step is planned and given to the device before the previous one has
        ended, as in a worker.
        """
        executor = self.executor
        # A new one, so that a run that went wrong leaves nothing behind.
        scheduler = Scheduler(executor.scheduler)
        for prompt in prompts:
            seq = self.number()
            scheduler.add(SchedulerRequest(seq, prompt, new), time.monotonic())
            executor.register(
                RegisterSequences(seq, len(prompt), prompt, SequenceSamplingParams(temperature=0.0))
            )
        done: list[Step] = []
        under_way: deque[tuple[StepPlan, Batch, Tensor]] = deque()
        while True:
            while (plan := scheduler.schedule(time.monotonic())) is not None:
                batch = executor.prepare(plan)
                under_way.append((plan, batch, executor.compute(batch, None)))
            if not under_way:
                return done
            plan, batch, output = under_way.popleft()
            spent = executor.wait(batch)
            sampled, _ = executor.sample(batch, output)
            faults = [one.error for one in sampled if one.error]
            if faults:
                raise ArithmeticError(f"{len(faults)} rows of a step: {faults[0]}")
            scheduler.commit(StepResult(plan.step, sampled))
            done.append(Step(plan, batch, spent, time.perf_counter()))

    def number(self) -> int:
        """Of a new sequence."""
        self._next += 1
        return self._next


def ready(model: Model) -> Measured:
    """Everything that the rows behind it need: weights, the reference, the executor, its graphs."""
    executor = model.executor
    return Measured({"graphs": executor.num_graphs}, fault=executor.graph_fault)


def decode(model: Model, batch: int) -> Measured:
    """A run of decodes: a step by the device's events and by the clock on the wall."""
    loads, executor = model.loads, model.executor
    model.run(model.prompts(batch, 3), SETTLING)
    host = executor.host_seconds
    steps = model.run(model.prompts(batch, loads.prompt), model.new(batch))
    host = (executor.host_seconds - host) / len(steps)
    counted = [step for step in steps if step.is_decode and len(step.plan.rows) == batch]
    counted = counted[SETTLING:-1]
    device = median(step.spent.elapsed for step in counted)
    ends = [step.committed for step in counted]
    wall = median(after - before for before, after in pairwise(ends))
    first, last = counted[0].batch.device_state, counted[-1].batch.device_state
    busy = sum(step.spent.busy for step in counted)
    busy /= last.spans[-1][1].seconds_since(first.spans[0][0])
    seen = sum(row.start + 1 for step in counted for row in step.plan.rows) / len(counted)
    figures = {
        "ms": device * 1000,
        "wall_ms": wall * 1000,
        "host_ms": host * 1000,
        "busy": busy,
        "steps": len(counted),
        "tokens_per_s": batch / wall,
        "weight_bytes": sizes_of(model)[0],
    }
    figures |= work_of(model, batch, seen)
    aims = {"busy": BUSY} | ({"weights_share": WEIGHTS} if batch == 1 else {})
    return Measured(figures, aims, note=executor.graph_fault)


def prefill(model: Model, tokens: int) -> Measured:
    """A lone prompt in one step."""
    runs = [model.run(model.prompts(1, tokens), 1) for _ in range(PREFILLS)][1:]
    assert all(len(run) == 1 for run in runs), "a prompt took several steps"
    seconds = median(run[0].spent.elapsed for run in runs)
    config, (weight_bytes, matrices) = model.config, sizes_of(model)
    head = config["hidden_size"] * config["vocab_size"]
    pairs = tokens * (tokens + 1) // 2 * config["num_hidden_layers"]
    figures = {
        "ms": seconds * 1000,
        "tokens_per_s": tokens / seconds,
        "bytes": weight_bytes,
        # One row of logits.
        "flops": 2.0 * tokens * (matrices - head) + 2.0 * head + 4 * config["hidden_size"] * pairs,
    }
    return Measured(figures, {"matrix_share": MATRIX})


def sizes_of(model: Model) -> tuple[int, int]:
    """Bytes of the weights that a step reads, and numbers in those that it multiplies by: all but
    the embedding, of which it looks up rows."""
    read = {name: each for name, each in model.weights.items() if "embed_tokens" not in name}
    matrices = sum(each.numel() for each in read.values() if each.dim() == 2)
    return sum(each.nbytes for each in read.values()), matrices


def work_of(model: Model, batch: int, seen: float) -> dict[str, float]:
    """Bytes and operations of a decode step that sees so many tokens of all its texts together."""
    config, (weight_bytes, matrices) = model.config, sizes_of(model)
    layers, hidden, heads = (
        config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    cached = 2 * config["num_key_value_heads"] * (hidden // heads) * layers * 2
    return {
        "bytes": weight_bytes + seen * cached,
        "flops": 2.0 * batch * matrices + 4.0 * seen * hidden * layers,
    }


def rows(
    place: Place, name: str, folder: Path, options: dict[str, str], graphs: bool = True
) -> Iterator[Named]:
    """All rows of a model; arguments as of Model. transformers' continuous batching comes last, for
    it changes how its model attends."""
    model = Model(place, name, options, folder, graphs)
    loads = model.loads
    yield Named(READY, partial(ready, model))
    for batch in loads.batches:
        yield Named(f"decode, batch {batch}", partial(decode, model, batch))
    for tokens in loads.prefills:
        yield Named(f"prefill {tokens}", partial(prefill, model, tokens))
    for way in agreement.WAYS:
        yield Named(f"agreement, {way}", partial(_agreement, model, way))
    for batch in loads.batches:
        yield Named(f"transformers generate, batch {batch}", partial(_generate, model, batch), True)
    for batch in loads.continuous:
        name = f"transformers continuous batching, batch {batch}"
        yield Named(name, partial(_continuous, model, batch), True)


def _agreement(model: Model, way: str) -> Measured:
    return agreement.measure(model.executor, model.truth, way, model.number())


def _generate(model: Model, batch: int) -> Measured:
    return _rival(model, batch, model.peer.generate)


def _continuous(model: Model, batch: int) -> Measured:
    return _rival(model, batch, model.peer.continuous)


def _rival(
    model: Model, batch: int, run: Callable[[Sequence[Sequence[int]], int], Measured]
) -> Measured:
    """transformers' step, by the clock, beside the limit of its work."""
    loads = model.loads
    made = run(model.prompts(batch, loads.prompt), loads.peer_new)
    made.figures |= work_of(model, batch, batch * (loads.prompt + loads.peer_new / 2))
    return made
