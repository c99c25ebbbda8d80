"""Sessions against a model: what a receiver delivers while a transport loses and mixes frames."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.messages.codec import decode_for_head, encode
from gllm.messages.lifecycle import StageFailed
from gllm.runtime.messaging.session import (
    ANY_EPOCH,
    HEADER,
    MAX_KEPT_BYTES,
    SessionError,
    SessionReceiver,
    SessionSender,
)
from tests.support.examples import num_examples

RUN, OTHER_RUN = 5, 6
PART_BYTES = 40
KEPT_BYTES = 400
TORN = -1
"""Number of a frame that is incomplete."""


@dataclass
class Sent:
    """A frame in the transport, with the message that it ends."""

    frame: bytes
    number: int
    epoch: int
    cause: str | None
    """Text of the message, in its last frame; None in the others."""


@dataclass
class Link:
    """One session: its ends and the model of the receiving one."""

    sender: SessionSender
    receiver: SessionReceiver
    run: int
    transport: list[Sent] = field(default_factory=list)
    num_sent: int = 0
    num_received: int = 0
    """Frames that arrived in order."""
    delivered: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    kept: list[tuple[int, str]] = field(default_factory=list)
    num_kept_bytes: int = 0
    num_stale: int = 0
    num_foreign: int = 0
    has_ended: bool = False


class History:
    """Sessions of one hub, whose transport loses, repeats, reorders and tears frames."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.epoch = ANY_EPOCH
        self.links = [self.connect() for _ in range(3)]
        self.num_messages = 0

    def connect(self) -> Link:
        run = RUN if self.rng.random() < 0.8 else OTHER_RUN
        receiver = SessionReceiver(RUN, decode_for_head, self.epoch, KEPT_BYTES)
        return Link(SessionSender(run, PART_BYTES), receiver, run)

    def play(self, num_actions: int) -> None:
        """Take random actions and check after each; sessions that have ended make room."""
        actions = {
            self.send: 6,
            self.deliver: 6,
            self.advance: 0.5,
            self.lose: 0.1,
            self.repeat: 0.1,
            self.swap: 0.1,
            self.tear: 0.1,
        }
        for _ in range(num_actions):
            (action,) = self.rng.choices(list(actions), list(actions.values()))
            action(self.rng.choice(self.links))
            for link in self.links:
                self.check(link)
            self.links = [self.connect() if link.has_ended else link for link in self.links]

    def send(self, link: Link) -> None:
        offset = self.rng.choice([-2, -1, 0, 0, 0, 0, 1, 2])
        epoch = max(1, self.epoch + offset)
        if self.rng.random() < 0.2:
            epoch = ANY_EPOCH
        size = self.rng.choice([0, 0, 0, 20, 60, 150])
        cause = f"{self.num_messages}:" + "x" * size
        self.num_messages += 1
        frames = link.sender.frames(encode(StageFailed(0, cause)), epoch)
        for position, frame in enumerate(frames, start=1):
            last = cause if position == len(frames) else None
            assert len(frame) <= PART_BYTES + HEADER.size
            link.transport.append(Sent(frame, link.num_sent, epoch, last))
            link.num_sent += 1

    def deliver(self, link: Link) -> None:
        count = self.rng.randrange(1, 12)
        for sent in link.transport[:count]:
            self.arrive(link, sent)
        del link.transport[:count]

    def lose(self, link: Link) -> None:
        position = self.rng.randrange(6)
        del link.transport[position : position + 1]

    def repeat(self, link: Link) -> None:
        source, target = self.rng.randrange(6), self.rng.randrange(6)
        link.transport[target:target] = link.transport[source : source + 1]

    def swap(self, link: Link) -> None:
        if len(link.transport) > 1:
            position = self.rng.randrange(len(link.transport) - 1)
            link.transport.insert(position, link.transport.pop(position + 1))

    def tear(self, link: Link) -> None:
        """Cut the end of a frame off."""
        if link.transport:
            position = self.rng.randrange(len(link.transport))
            sent = link.transport[position]
            if not sent.frame:
                # It was torn before, to nothing.
                return
            cut = self.rng.randrange(1, len(sent.frame) + 1)
            link.transport[position] = Sent(sent.frame[:-cut], TORN, sent.epoch, None)

    def advance(self, _: Link) -> None:
        """Begin a later epoch at all receivers."""
        self.epoch += self.rng.choice([1, 1, 2])
        for link in self.links:
            due = [cause for epoch, cause in link.kept if epoch == self.epoch]
            link.num_stale += sum(epoch < self.epoch for epoch, _ in link.kept)
            link.kept = [entry for entry in link.kept if entry[0] > self.epoch]
            if not link.kept:
                link.num_kept_bytes = 0
            link.expected += due
            for message in link.receiver.advance(self.epoch):
                assert isinstance(message, StageFailed)
                link.delivered.append(message.cause)

    def arrive(self, link: Link, sent: Sent) -> None:
        """Give a frame to a receiver and the model."""
        if link.has_ended:
            return
        try:
            message = link.receiver.receive(sent.frame)
        except SessionError:
            assert sent.number != link.num_received or self.is_too_much(link, sent)
            link.has_ended = True
            return
        if message is not None:
            assert isinstance(message, StageFailed)
            link.delivered.append(message.cause)
        if link.run != RUN:
            link.num_foreign += 1
        elif sent.number == TORN:
            # Only the decoder can see it. From here on the model does not know what is right.
            link.has_ended = True
        else:
            assert sent.number == link.num_received, "a frame out of order was taken"
            link.num_received += 1
            self.expect(link, sent)

    @staticmethod
    def is_too_much(link: Link, sent: Sent) -> bool:
        size = len(encode(StageFailed(0, sent.cause))) if sent.cause is not None else 0
        return link.num_kept_bytes + size > KEPT_BYTES

    def expect(self, link: Link, sent: Sent) -> None:
        """Add the message that a frame has completed to what has to be delivered."""
        if sent.cause is None:
            return
        if sent.epoch in (ANY_EPOCH, self.epoch):
            link.expected.append(sent.cause)
        elif sent.epoch < self.epoch:
            link.num_stale += 1
        else:
            link.kept.append((sent.epoch, sent.cause))
            link.num_kept_bytes += len(encode(StageFailed(0, sent.cause)))

    def check(self, link: Link) -> None:
        """Check that exactly the messages of frames in order were delivered, once."""
        if link.has_ended:
            assert link.delivered == link.expected[: len(link.delivered)]
            return
        assert link.delivered == link.expected
        assert link.receiver.num_stale == link.num_stale
        assert link.receiver.num_foreign == link.num_foreign


@settings(max_examples=num_examples(25, 2000), deadline=None)
@given(st.integers(0, 2**32))
def test_sessions_deliver_what_arrives_in_order_once(seed: int) -> None:
    History(random.Random(seed)).play(400)


def test_what_is_kept_back_is_bounded() -> None:
    receiver = SessionReceiver(RUN, decode_for_head, 1)
    sender = SessionSender(RUN)
    payload = encode(StageFailed(0, "x" * 2**20))
    count = MAX_KEPT_BYTES // len(payload)
    for frame in (frame for _ in range(count) for frame in sender.frames(payload, 2)):
        assert receiver.receive(frame) is None
    with pytest.raises(SessionError, match="too many"):
        list(map(receiver.receive, sender.frames(payload, 2)))


@pytest.mark.parametrize(("epoch", "left"), [(1, 3), (1, 1), (2, 2)])
def test_parts_of_different_messages_are_not_joined(epoch: int, left: int) -> None:
    receiver = SessionReceiver(RUN, decode_for_head, 1)
    assert receiver.receive(HEADER.pack(RUN, 1, 0, 3) + b"a") is None
    with pytest.raises(SessionError, match="not continued"):
        receiver.receive(HEADER.pack(RUN, epoch, 1, left) + b"b")
