"""A device of its own in the place of CUDA: late, out of order, and strict about both.

What torch is asked for within a stream is noted, not computed: its result is memory full of poison
until the operation's turn comes, in an order drawn at random among those that streams and waits
allow. So work that lacks a wait computes with wrong numbers.

Beside that every operation has a vector clock (Mattern, "Virtual Time and Global States" (1989)),
and so has every thread of the host. Reads and writes of memory are found by looking at torch's
operations; two of them that meet, one a write, and that no wait puts in order raise Race whatever
the order they came in (Lamport, "Time, Clocks, and the Ordering of Events" (1978)). A look of the
host into memory of the device raises HiddenSync: CUDA would stop and wait there.

A graph holds operations, not Python: what the host decides while it is captured stays as it was.
"""

import inspect
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.support.gpu.fake_graphs import FakeGraph
from tests.support.gpu.memory_uses import (
    Clock,
    HiddenSync,
    Operation,
    Race,
    Seen,
    Use,
    merge,
    poisoned,
    uses_of,
)
from tests.support.gpu.operation_layouts import (
    is_composite,
    is_view,
    result_layouts,
    tensors_in,
    written_arguments,
)
from tests.support.gpu.turns import Turns

HOST_READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")


class FakeEvent:
    """A place in a stream."""

    def __init__(self, queues: "FakeQueues") -> None:
        self._queues = queues
        self.clock: Clock = {}
        self.reached = [True]
        """Of the last record, shared with who waits for it."""
        self.time = 0.0
        """When the device got to the last record."""

    def synchronize(self) -> None:
        self._queues.note_host_wait(calling_frame())
        if not self._queues.ignores_wait(calling_frame()):
            reached = self.reached
            self._queues.advance(lambda: reached[0])
            merge(self._queues.host_clock, self.clock)
        self._queues.advance_some()

    def query(self) -> bool:
        self._queues.step_once()
        if self.reached[0]:
            merge(self._queues.host_clock, self.clock)
        return self.reached[0]

    def seconds_since(self, earlier: Any) -> float:
        """The device's time between the two, an operation a second; not to be asked before it got
        there."""
        assert self.reached[0], "the host did not wait"
        assert earlier.reached[0], "the host did not wait"
        return self.time - earlier.time


class FakeStream:
    """Operations to come. Events are those of the same queues: FakeEvent."""

    def __init__(self, queues: "FakeQueues", who: int, rank: float) -> None:
        self._queues, self.who, self.rank = queues, who, rank
        self.clock: Clock = {}
        self.pending: deque[Operation] = deque()

    @contextmanager
    def current(self) -> Iterator[None]:
        outer, self._queues.stream_now = self._queues.stream_now, self
        try:
            yield
        finally:
            self._queues.stream_now = outer

    def wait(self, event: Any) -> None:
        self.wait_for(event, calling_frame())

    def wait_for(self, event: Any, frame: Any) -> None:
        """A wait of a frame that may be the one to be left out."""
        if not self._queues.ignores_wait(frame):
            self.follow(event)

    def follow(self, event: Any) -> None:
        """A wait that cannot be left out."""
        graph = self._queues.graph
        if graph is not None and graph.wait(self, event):
            return
        reached = event.reached
        self._put(Operation("wait", lambda: None, ready=lambda: reached[0]))
        merge(self.clock, event.clock)

    def record(self, event: Any) -> None:
        graph = self._queues.graph
        if graph is not None and graph.holds(self):
            graph.record(self, event)
            return
        reached = event.reached = [False]

        def reach() -> None:
            reached[0], event.time = True, self._queues.now

        self._put(Operation("record", reach))
        event.clock = dict(self.clock)

    def put(self, operation: Operation) -> None:
        """One more operation at the end; the host may be ahead of it by any time."""
        graph = self._queues.graph
        if graph is not None and graph.holds(self):
            graph.put(self, operation)
            return
        self._put(operation)
        self._queues.advance_some()

    def _put(self, operation: Operation) -> None:
        merge(self.clock, self._queues.tick_host())
        self.clock[self.who] = self.clock.get(self.who, 0) + 1
        operation.clock, operation.who = dict(self.clock), self.who
        self.pending.append(operation)


class FakeQueues:
    """The device. `with queues:` around everything that a test does on the host.

    ignored: a wait (file:line, as in `waits`) that is left out; checks: whether races raise;
    eagerness: how often the device goes on by itself, between 0 and 1; turns: of the hosts of
    several devices that wait for each other, one thread each; num_bytes: its memory beside the
    largest step.
    """

    def __init__(
        self,
        seed: int = 0,
        ignored: str = "",
        checks: bool = True,
        eagerness: float = 0.3,
        turns: Turns | None = None,
        num_bytes: int = 1000,
    ) -> None:
        self.device = torch.device("cpu")
        self.capability: tuple[int, int] | None = None
        self.waits: set[str] = set()
        """All places that wait."""
        self.host_waits: set[tuple[str, str]] = set()
        """(thread, place) where the host waits for the device."""
        self.stream_now: FakeStream | None = None
        self.now = 0.0
        """The device's clock: an operation takes a second, waits and records none."""
        self._random = random.Random(seed)
        self._ignored, self._checks, self._eagerness = ignored, checks, eagerness
        self._is_ranked = self._random.random() < 0.5
        """Some streams nearly always go first: what lacks a wait may be late by several steps
        (Burckhardt et al., "A Randomized Scheduler..." (2010))."""
        self._streams: list[FakeStream] = []
        self._seen: defaultdict[int, list[Seen]] = defaultdict(list)
        """Uses that a later one could race with, by the address of memory."""
        self._known: dict[int, str] = {}
        """pinned or device, by the address of memory."""
        self._alive: list[Any] = []
        """All memory: an address is never used twice."""
        self._hosts: defaultdict[str, Clock] = defaultdict(dict)
        self._host = "host"
        self._host_ids: dict[str, int] = {}
        self._turns, self.num_bytes = turns, num_bytes
        self.graph: FakeGraph | None = None
        """The one that is being captured."""
        self.graphs: WeakSet[FakeGraph] = WeakSet()
        """Those that somebody holds."""
        self.num_replays = 0
        """Launches of graphs."""
        self.used_bytes: list[int] = []
        """Results of `measure_used_bytes`."""
        self.bound: set[str] = set()
        """Threads that made this device their current one."""
        self._modes = _Calls(self), _Operations(self)

    def __enter__(self) -> "FakeQueues":
        if self._turns is not None:
            self._turns.work_meanwhile(self._step)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    # What gllm.transport.device_streams.DeviceRuntime asks for.

    def bind_thread(self) -> None:
        self.bound.add(threading.current_thread().name)

    @contextmanager
    def host_work(self) -> Iterator[None]:
        outer, self.stream_now = self.stream_now, None
        try:
            yield
        finally:
            self.stream_now = outer

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream(self, len(self._streams), self._random.random()))
        return self._streams[-1]

    def event(self, timed: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._made(poisoned(shape, dtype), "pinned")

    def pin_memory(self, memory: Tensor) -> None:
        self._made(memory, "pinned")

    def unpin_memory(self, memory: Tensor) -> None:
        """Nothing: what is freed stays known."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            return self._made(torch.zeros(tuple(shape), dtype=dtype), "device")

    def capture(self, stream: Any, work: Callable[[], None]) -> FakeGraph:
        graph = self.graph = FakeGraph(self, stream)
        try:
            with stream.current():
                work()
        finally:
            self.graph = None
        graph.end()
        self.graphs.add(graph)
        return graph

    def synchronize(self) -> None:
        self.note_host_wait(calling_frame())
        self.advance(lambda: not any(stream.pending for stream in self._streams))
        for stream in self._streams:
            merge(self.host_clock, stream.clock)

    def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
        work()
        self.synchronize()
        return int(share * self.num_bytes)

    def measure_used_bytes(self, work: Callable[[], None]) -> int:
        before = len(self._alive)
        work()
        self.synchronize()
        made = [tensor for tensor in self._alive[before:] if self.kind(tensor) == "device"]
        self.used_bytes.append(sum(tensor.untyped_storage().nbytes() for tensor in made))
        return self.used_bytes[-1]

    # Threads of the host.

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """The host's work within it is that of another thread."""
        outer, self._host = self._host, name
        try:
            yield
        finally:
            self._host = outer

    def hand_over(self, giver: str, taker: str) -> None:
        """What one thread did comes before what another does from now on, as by a queue."""
        merge(self._hosts[taker], self._hosts[giver])

    @property
    def host_clock(self) -> Clock:
        return self._hosts[self._host]

    def tick_host(self) -> Clock:
        """The host's clock at its next deed."""
        who = self._host_id()
        self.host_clock[who] = self.host_clock.get(who, 0) + 1
        return dict(self.host_clock)

    def _host_id(self) -> int:
        """Threads of the host count down, streams up."""
        return self._host_ids.setdefault(self._host, -1 - len(self._host_ids))

    # Memory.

    def adopt(self, *trees: Any) -> None:
        """Tensors that have been on the device before: weights, say."""
        for tensor in tensors_in(*trees):
            self._made(tensor, "device")

    def _made(self, tensor: Tensor, kind: str) -> Tensor:
        self._alive.append(tensor)
        if tensor.untyped_storage().nbytes():
            self._known[tensor.untyped_storage().data_ptr()] = kind
        return tensor

    def kind(self, tensor: Tensor) -> str:
        """device, pinned, or host for memory that is none of ours."""
        return self._known.get(tensor.untyped_storage().data_ptr(), "host")

    @staticmethod
    def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their present numbers, as a debugger sees them."""
        with _disable_current_modes():
            return [tensor.clone() for tensor in tensors]

    # Order.

    def ignores_wait(self, frame: Any) -> bool:
        """Whether this wait is the one to be left out; waits are told by their callers' lines."""
        place = place_of(frame)
        self.waits.add(place)
        return place == self._ignored

    def note_host_wait(self, frame: Any) -> None:
        """The host waits for the device here."""
        self.host_waits.add((self._host, place_of(frame)))

    def advance_some(self) -> None:
        """The device goes on for a while, or does not."""
        if self._turns is not None:
            self._turns.maybe_switch()
        while self._random.random() < self._eagerness and self._step():
            pass

    def elapse(self, seconds: float) -> None:
        """The host is busy for so long; the device does what it has, and waits."""
        while self._step():
            pass
        self.now += seconds

    def step_once(self) -> None:
        """The device goes on by an operation, if it can."""
        self._step()

    def advance(self, done: Callable[[], bool]) -> None:
        """The device goes on until something has come."""
        while not done():
            if not self._step():
                assert self._turns is not None, "streams wait for each other"
                self._turns.stall()

    def _step(self) -> bool:
        """One operation of a stream that may go on; False where none may."""
        able = [s for s in self._streams if s.pending and s.pending[0].ready()]
        if not able:
            return False
        chosen = self._random.choice(able)
        if self._is_ranked and self._random.random() < 0.95:
            chosen = max(able, key=lambda stream: stream.rank)
        operation = chosen.pending.popleft()
        self.check(operation.uses, operation.clock, operation.who, operation.name)
        # Not to be noted once more.
        with _disable_current_modes(), torch.inference_mode():
            operation.run()
        self.now += bool(operation.uses)
        if self._turns is not None:
            self._turns.progress()
        return True

    def check(self, uses: list[Use], clock: Clock, who: int, name: str) -> None:
        """Every earlier use of the same memory has to come before this clock."""
        for use in uses:
            for seen in self._seen[use.home] if self._checks else []:
                meets = use.begin < seen.use.end and seen.use.begin < use.end
                if meets and (use.writes or seen.use.writes) and clock.get(seen.who, 0) < seen.time:
                    raise Race(f"{name} ({self._word(use)}) is in no order with {seen.name}")
            self._note(Seen(use, who, clock[who], name))

    def _note(self, new: Seen) -> None:
        """Remember a use; what comes after a write comes after all that the write came after."""
        use = new.use
        kept = [
            seen
            for seen in self._seen[use.home]
            if not (use.begin <= seen.use.begin and seen.use.end <= use.end)
            or not (use.writes or (seen.who == new.who and not seen.use.writes))
        ]
        self._seen[use.home] = [*kept, new]

    def _word(self, use: Use) -> str:
        return "writes" if use.writes else "reads"

    # What torch is asked for.

    def on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation of the host, at once."""
        if not is_view(func):
            known = [t for t in tensors_in(args, kwargs) if self.kind(t) != "host"]
            if any(self.kind(tensor) == "device" for tensor in known):
                raise Race(f"{func} uses memory of the device on no stream")
            written = written_arguments(func, args, kwargs)
            clock = self.tick_host()
            uses = [
                use for t in known for use in uses_of([t], any(t is other for other in written))
            ]
            self.check(uses, clock, self._host_id(), f"the host's {func}")
        return func(*args, **kwargs)

    def read_by_host(self, tensor: Tensor, how: str) -> None:
        """The host looks at numbers."""
        kind = self.kind(tensor)
        if kind == "device":
            raise HiddenSync(f"{how} of a tensor on the device")
        if kind == "pinned":
            clock = self.tick_host()
            self.check(uses_of([tensor], False), clock, self._host_id(), f"the host's {how}")

    def on_stream(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation of the device, for later; its result, not computed yet."""
        if is_view(func):
            return func(*args, **kwargs)
        arguments = tensors_in(args, kwargs)
        # What is made like memory of the host, for the device, is the device's.
        is_solid = any(tensor.dim() and tensor.numel() for tensor in arguments)
        is_made = kwargs.get("device") is not None
        if is_solid and not is_made and all(self.kind(tensor) != "device" for tensor in arguments):
            # Streams are the device's: what has no tensor there is done by the host at once.
            return self.on_host(func, args, kwargs)
        for tensor in arguments:
            if self.kind(tensor) == "host" and tensor.dim() and tensor.numel():
                raise HiddenSync(f"{func} reads memory of the host that is not pinned")
        written = written_arguments(func, args, kwargs)
        reads = [t for t in arguments if not any(t is other for other in written)]
        if "index_put" in str(func) and any(t.dtype == torch.bool for t in tensors_in(args[1])):
            # The result's shape does not tell, for it is written in place.
            raise HiddenSync(f"{func} counts where a condition holds")
        if written:
            self._later(func, lambda: func(*args, **kwargs), reads, written)
            return written[0] if len(written) == 1 else tuple(written)
        results = self._promised(func, args, kwargs)

        def run() -> None:
            values = tensors_in(func(*args, **kwargs))
            for result, value in zip(tensors_in(results), values, strict=True):
                result.copy_(value)

        self._later(func, run, reads, tensors_in(results))
        return results

    def _promised(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Memory for an operation's results, poisoned; a shape that depends on numbers raises."""
        try:
            layouts = result_layouts(func, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise HiddenSync(f"{func}: {error}") from error

        def made(layout: Tensor) -> Tensor:
            return self._made(poisoned(layout.shape, layout.dtype, layout.stride()), "device")

        return tree_map_only(Tensor, made, layouts)

    def _later(
        self, func: Any, run: Callable[[], None], reads: list[Tensor], writes: list[Tensor]
    ) -> None:
        assert self.stream_now is not None
        uses = uses_of(reads, False) + uses_of(writes, True)
        self.stream_now.put(Operation(str(func), run, uses))


def calling_frame() -> FrameType:
    """The frame of the caller of the function that asks."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


def place_of(frame: Any) -> str:
    """A frame's file and line."""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


class _Operations(TorchDispatchMode):
    """Sees every operation of torch."""

    def __init__(self, queues: FakeQueues) -> None:
        super().__init__()
        self._queues = queues

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if self._queues.stream_now is None:
            return self._queues.on_host(func, args, kwargs)
        return self._queues.on_stream(func, args, kwargs)


class _Calls(TorchFunctionMode):
    """Sees how the host looks at numbers, which is no operation of torch."""

    def __init__(self, queues: FakeQueues) -> None:
        super().__init__()
        self._queues = queues

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS and args and isinstance(args[0], Tensor):
            self._queues.read_by_host(args[0], name)
        return func(*args, **(kwargs or {}))
