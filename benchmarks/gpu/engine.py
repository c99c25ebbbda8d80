"""gllm's engine without its processes: scheduler and executor in one loop, as a worker runs them.

Has the rows of one model: decodes, prefill, transformers (peers.py) and the agreement
(agreement.py).
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
from benchmarks.gpu.rows import Measured, PendingRow, SkipRowError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.executor import DeviceTime
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

T = TypeVar("T")

BUSY, WEIGHTS, MATRIX = 0.95, 0.8, 0.6
"""Targets of a decode run and of prefill.

The busy share of the device in a decode run; weight bytes / bandwidth of a step at batch 1 as a
share (1 / 1.25); the share of the matrix rate in prefill.
"""
READY = "ready"
NUM_WARM_UP_STEPS = 3
"""Decode steps at the start of a run that are not counted; the last step is not counted either."""
PREFILLS = 5


class PrerequisiteError(Exception):
    """A prerequisite of several rows could not be created."""


class Loads(NamedTuple):
    """Loads for a model."""

    batches: tuple[int, ...]
    prompt: int
    """Tokens per prompt of a decode run."""
    new: int
    """Tokens that each text generates with gllm, before those that compensate for prefill."""
    peer_new: int
    """Tokens that each text generates with transformers."""
    prefills: tuple[int, ...]
    positions: int
    """Positions of the teacher-forced agreement."""
    longest: int
    continuous: tuple[int, ...]
    """Batches of transformers' continuous batching; each run takes seconds to start."""


REAL = Loads((1, 8, 64, 256), 256, 72, 16, (2048, 512), 512, 4096, (256, 1, 64, 8))
DRY = Loads((1, 3), 7, 9, 3, (24,), 24, 64, (3,))


class Step(NamedTuple):
    """One completed step."""

    plan: StepPlan
    batch: Batch
    spent: DeviceTime
    committed: float
    """Time at which its tokens were known, by time.perf_counter."""

    @property
    def is_decode(self) -> bool:
        """Return True if all rows of the step are decodes."""
        return all(row.num_tokens == 1 for row in self.plan.rows)


@dataclass
class Model:
    """One model, its weights and both engines for them, each created on first use."""

    place: Place
    name: str
    options: dict[str, str]
    folder: Path
    """Folder of config.json; created here."""
    graphs: bool
    """Record CUDA graphs of decodes."""

    def __post_init__(self) -> None:
        self.loads = DRY if self.place.is_dry else REAL
        self.config = models.config_of(self.name, self.place.is_dry)
        self.folder.mkdir(parents=True, exist_ok=True)
        models.write_config(self.config, self.folder)
        self._next = 0
        self._created: dict[str, Any] = {}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Weights by their names in checkpoints."""
        return models.random_weights(self.place, self.config)

    @property
    def peer(self) -> peers.Peer:
        """The model of transformers, on the same weights."""
        return self._once("peer", lambda: peers.Peer(self.place, self.folder, self.weights))

    @property
    def truth(self) -> agreement.Truth:
        """Reference logits; computed before gllm loads the weights, because it marks some."""
        return self._once("truth", self._make_truth)

    @property
    def executor(self) -> models.Executor:
        """The executor of gllm."""
        return self._once("executor", self._make_executor)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """Return the object of this name, created once; raise the same error again on failure."""
        if name not in self._created:
            try:
                self._created[name] = make()
            except Exception as error:
                # A new error: the frames of the original one hold device memory.
                kept = (
                    SkipRowError(str(error))
                    if isinstance(error, SkipRowError)
                    else PrerequisiteError(f"{name}: {error}")
                )
                kept.add_note(traceback.format_exc())
                self._created[name] = kept
        created = self._created[name]
        if isinstance(created, Exception):
            raise created
        return created

    def _make_truth(self) -> agreement.Truth:
        return agreement.truth_of(self.peer, self.weights, self.loads.positions)

    def _make_executor(self) -> models.Executor:
        with suppress(Exception):
            # The rows of the agreement report its error.
            self.truth  # noqa: B018
        sizes = self.blocks, self.loads.longest
        arguments = self.place, self.folder, self.weights, *sizes, self.options, self.graphs
        executor = models.executor_of(*arguments)
        # As in a worker: these objects are permanent, so the collector need not scan them.
        gc.collect()
        gc.freeze()
        return executor

    @property
    def blocks(self) -> int:
        """Number of KV blocks that the largest load needs."""
        loads, batch = self.loads, max(self.loads.batches)
        longest = -(-max(loads.longest, loads.prompt + self.new(batch) + 1) // models.BLOCK_SIZE)
        each = -(-(loads.prompt + self.new(batch) + 1) // models.BLOCK_SIZE)
        return max(2 * longest, (batch + 1) * (each + 1) * 5 // 4)

    def new(self, batch: int) -> int:
        """Return the tokens that each of `batch` texts generates.

        Texts start to decode as their prompts finish, one step's worth after the other; the
        additional tokens let enough steps contain all of them.
        """
        return self.loads.new + -(-batch * self.loads.prompt // models.BATCHED)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random prompts."""
        return torch.randint(0, self.config["vocab_size"], (count, length)).tolist()

    def run(self, prompts: Sequence[list[int]], new: int) -> list[Step]:
        """Generate `new` greedy tokens for all prompts at once.

        With async scheduling a step is planned and enqueued before the previous one has ended, as
        in a worker.
        """
        executor = self.executor
        # A new scheduler, so that a failed run leaves no state behind.
        scheduler = Scheduler(executor.scheduler)
        for prompt in prompts:
            seq = self.number()
            scheduler.add(SchedulerRequest(seq, prompt, new), time.monotonic())
            executor.register(
                RegisterSequences(seq, len(prompt), prompt, SequenceSamplingParams(temperature=0.0))
            )
        done: list[Step] = []
        in_flight: deque[tuple[StepPlan, Batch, Tensor]] = deque()
        while True:
            while (plan := scheduler.schedule(time.monotonic())) is not None:
                batch = executor.prepare(plan)
                in_flight.append((plan, batch, executor.compute(batch, None)))
            if not in_flight:
                return done
            plan, batch, output = in_flight.popleft()
            spent = executor.wait(batch)
            sampled, _ = executor.sample(batch, output)
            faults = [row.error for row in sampled if row.error]
            if faults:
                raise ArithmeticError(f"{len(faults)} rows of a step: {faults[0]}")
            scheduler.commit(StepResult(plan.step, sampled))
            done.append(Step(plan, batch, spent, time.perf_counter()))

    def number(self) -> int:
        """Return the number of a new sequence."""
        self._next += 1
        return self._next


def ready(model: Model) -> Measured:
    """Create the prerequisites of the other rows: weights, reference, executor, graphs."""
    executor = model.executor
    return Measured({"graphs": executor.num_graphs}, fault=executor.graph_fault)


def decode(model: Model, batch: int) -> Measured:
    """Measure the decode steps of a run by device events and by wall clock."""
    loads, executor = model.loads, model.executor
    model.run(model.prompts(batch, 3), NUM_WARM_UP_STEPS)
    host = executor.host_seconds
    steps = model.run(model.prompts(batch, loads.prompt), model.new(batch))
    host = (executor.host_seconds - host) / len(steps)
    counted = [step for step in steps if step.is_decode and len(step.plan.rows) == batch]
    counted = counted[NUM_WARM_UP_STEPS:-1]
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
    """Measure a single prompt in one step."""
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
        # The LM head computes one row of logits.
        "flops": 2.0 * tokens * (matrices - head) + 2.0 * head + 4 * config["hidden_size"] * pairs,
    }
    return Measured(figures, {"matrix_share": MATRIX})


def sizes_of(model: Model) -> tuple[int, int]:
    """Return the bytes of the weights that a step reads and the number of matrix elements.

    The embedding is excluded: a step looks up only some of its rows.
    """
    read = {name: each for name, each in model.weights.items() if "embed_tokens" not in name}
    matrices = sum(each.numel() for each in read.values() if each.dim() == 2)
    return sum(each.nbytes for each in read.values()), matrices


def work_of(model: Model, batch: int, seen: float) -> dict[str, float]:
    """Return the bytes and FLOPs of a decode step.

    Args:
        model: The model.
        batch: Number of decodes.
        seen: Context tokens of all texts together.
    """
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
) -> Iterator[PendingRow]:
    """Yield all rows of a model; the arguments are those of Model.

    transformers' continuous batching is last, because it changes the attention of its model.
    """
    model = Model(place, name, options, folder, graphs)
    loads = model.loads
    yield PendingRow(READY, partial(ready, model))
    for batch in loads.batches:
        yield PendingRow(f"decode, batch {batch}", partial(decode, model, batch))
    for tokens in loads.prefills:
        yield PendingRow(f"prefill {tokens}", partial(prefill, model, tokens))
    for way in agreement.WAYS:
        yield PendingRow(f"agreement, {way}", partial(_agreement, model, way))
    for batch in loads.batches:
        yield PendingRow(
            f"transformers generate, batch {batch}", partial(_generate, model, batch), True
        )
    for batch in loads.continuous:
        name = f"transformers continuous batching, batch {batch}"
        yield PendingRow(name, partial(_continuous, model, batch), True)


def _agreement(model: Model, way: str) -> Measured:
    return agreement.measure(model.executor, model.truth, way, model.number())


def _generate(model: Model, batch: int) -> Measured:
    return _rival(model, batch, model.peer.generate)


def _continuous(model: Model, batch: int) -> Measured:
    return _rival(model, batch, model.peer.continuous)


def _rival(
    model: Model, batch: int, run: Callable[[Sequence[Sequence[int]], int], Measured]
) -> Measured:
    """Measure transformers' step by wall clock, with the bytes and FLOPs of its work."""
    loads = model.loads
    measured = run(model.prompts(batch, loads.prompt), loads.peer_new)
    measured.figures |= work_of(model, batch, batch * (loads.prompt + loads.peer_new / 2))
    return measured
