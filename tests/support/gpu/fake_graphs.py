"""Graphs of the fake device: captured work of streams that fork and join, replayed with new clocks.

As with CUDA, a stream joins a capture by waiting for an event that was recorded in it, and all its
work has to come back to the stream that the capture began in.
"""

from typing import TYPE_CHECKING, NamedTuple

from tests.support.gpu.memory_uses import Clock, Operation, merge

if TYPE_CHECKING:
    from tests.support.gpu.fake_streams import FakeEvent, FakeQueues, FakeStream


class Unjoined(AssertionError):
    """Captured work that nothing in the stream of the graph comes after."""


class Node(NamedTuple):
    """An operation of a stream, or an event that it records or waits for."""

    stream: int
    operation: Operation | None = None
    recorded: "FakeEvent | None" = None
    awaited: "FakeEvent | None" = None


class FakeGraph:
    """Operations without clocks."""

    def __init__(self, queues: "FakeQueues", origin: "FakeStream") -> None:
        self._queues, self._origin = queues, origin.who
        self._nodes: list[Node] = []
        self._seen: dict[int, Clock] = {origin.who: {}}
        """Numbers of operations that come before the next one of a stream."""
        self._marks: dict[int, Clock] = {}
        """The same of captured events, by identity."""
        self._branches: dict[int, FakeStream] = {}
        """Streams of replays, by the stream that was captured."""

    def holds(self, stream: "FakeStream") -> bool:
        """True if operations put into a stream are captured."""
        return stream.who in self._seen

    def put(self, stream: "FakeStream", operation: Operation) -> None:
        seen = self._seen[stream.who]
        seen[stream.who] = seen.get(stream.who, 0) + 1
        self._nodes.append(Node(stream.who, operation))

    def record(self, stream: "FakeStream", event: "FakeEvent") -> None:
        self._marks[id(event)] = dict(self._seen[stream.who])
        self._nodes.append(Node(stream.who, recorded=event))

    def wait(self, stream: "FakeStream", event: "FakeEvent") -> bool:
        """Let a stream join the capture if the event is part of it; return True if it is."""
        mark = self._marks.get(id(event))
        if mark is None:
            assert not (self.holds(stream) and event.clock), "an event of before the capture"
            return False
        merge(self._seen.setdefault(stream.who, {}), mark)
        self._nodes.append(Node(stream.who, awaited=event))
        return True

    def end(self) -> None:
        """Check that every branch was joined."""
        for stream, seen in self._seen.items():
            if self._seen[self._origin].get(stream, 0) < seen.get(stream, 0):
                raise Unjoined(f"stream {stream} goes on behind the graph")

    def replay(self) -> None:
        stream = self._queues.stream_now
        assert stream is not None, "a graph is replayed into a stream"
        self._queues.num_replays += 1
        begin = self._queues.event()
        stream.record(begin)
        streams = {self._origin: stream}
        events: dict[int, FakeEvent] = {}
        for node in self._nodes:
            if node.stream not in streams:
                if node.stream not in self._branches:
                    self._branches[node.stream] = self._queues.stream()
                streams[node.stream] = self._branches[node.stream]
                streams[node.stream].follow(begin)
            here = streams[node.stream]
            if node.operation is not None:
                each = node.operation
                here.put(Operation(each.name, each.run, each.uses, ready=each.ready))
            elif node.recorded is not None:
                events[id(node.recorded)] = self._queues.event()
                here.record(events[id(node.recorded)])
            elif node.awaited is not None:
                here.follow(events[id(node.awaited)])
