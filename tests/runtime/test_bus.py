"""Channels between processes: order, loss, and what is no message."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gllm.messages.codec import AnyMessage
from gllm.messages.lifecycle import InitializeCache
from gllm.messages.requests import AbortSequences, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams as Spec
from gllm.messages.steps import RunStep
from gllm.runtime.bus import BusError, Inbox, Outbox
from gllm.scheduler.plan import ScheduledRow, StepPlan


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


class Heard:
    """What an inbox delivered."""

    def __init__(self, inbox: Inbox) -> None:
        self.messages: list[AnyMessage] = []
        self.fault: BusError | None = None
        self._news = asyncio.Event()
        inbox.start(self._hear, self._fail)

    def _hear(self, messages: list[AnyMessage]) -> None:
        self.messages += messages
        self._news.set()

    def _fail(self, fault: BusError) -> None:
        self.fault = fault
        self._news.set()

    async def until(self, count: int) -> None:
        """Wait for so many messages, or a fault."""
        while len(self.messages) < count and self.fault is None:
            await asyncio.wait_for(self._news.wait(), 60)
            self._news.clear()


async def test_messages_of_all_senders_arrive_whole_and_in_order(
    context: zmq.Context, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/inbox"
    inbox = Inbox(context, address)
    heard = Heard(inbox)
    senders = [Outbox(context, address, number) for number in range(3)]
    for number in range(1000):
        for index, sender in enumerate(senders):
            sender.send(AbortSequences([index, number]))
    await heard.until(3000)
    for index in range(3):
        own = [
            m.seqs[1]
            for m in heard.messages
            if isinstance(m, AbortSequences) and m.seqs[0] == index
        ]
        assert own == list(range(1000))
    inbox.close()
    for sender in senders:
        sender.close()


async def test_messages_survive_the_way(context: zmq.Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/inbox"
    inbox, sender = Inbox(context, address), Outbox(context, address, 0)
    sent = [
        SubmitRequest(3, [1, 2, 2**31 - 1], Spec(0.5, seed=-(2**63), banned=(2,)), 5, [2], n=2),
        RunStep(StepPlan(7, [ScheduledRow(3, 1, 0, 2, [9, 8], [-1], True)], [1, 2])),
        InitializeCache(12),
    ]
    for message in sent:
        sender.send(message)
    heard = Heard(inbox)
    await heard.until(3)
    assert heard.messages == sent
    inbox.close()
    sender.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x00" * 4 + b"\x02" + b"\x00" * 7, b"\x92\xa5Start\x01"],
        [b"\x00" * 12, b"\x92\xa5Start\xa1x"],
        [b"\x00" * 12, b"\x91\xa7Unknown"],
        [b"\x00" * 12, b"\x80\x04\x95K\x01."],
        [b"\x00" * 12],
        [b"", b""],
    ],
    ids=["gap", "wrong type", "unknown", "pickle", "one frame", "no header"],
)
async def test_what_is_no_message_is_a_fault(
    context: zmq.Context, tmp_path: Path, frames: list[bytes]
) -> None:
    address = f"ipc://{tmp_path}/inbox"
    inbox = Inbox(context, address)
    heard = Heard(inbox)
    with context.socket(zmq.PUSH) as raw:
        raw.connect(address)
        raw.send_multipart(frames)
        await heard.until(1)
    assert heard.fault is not None
    assert heard.messages == []
    inbox.close()
