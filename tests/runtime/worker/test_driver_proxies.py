"""Proxies relay messages between the driver and other machines' workers in order, undecoded."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_driver, decode_for_stage, encode
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import StageFrame
from gllm.messages.steps import GrammarReady, RegisterSequences
from gllm.runtime.driver.driver_relay import DriverProxies
from gllm.runtime.messaging.bus import Hub
from tests.support.nodes.fake_agent import until

RUN = 5


class DriverEnd:
    """The driver's hub of an epoch, the proxies, and what each side has received."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.proxies = DriverProxies(self.context, RUN)
        self.address = f"ipc://{folder}/driver"
        self.messages: list[tuple[int, Any]] = []
        self.lost: list[int] = []
        self.frames: list[WireMessage] = []
        """Sent to the agent."""
        self.hub = Hub(self.context, RUN, decode_for_driver)

    def connect(self, epoch: int, *senders: int) -> None:
        """Send the frames of agents whose workers have connected."""
        for sender in senders:
            self.proxies.on_frame(StageFrame(sender, epoch, b""))

    def begin(self, epoch: int, *senders: int) -> None:
        """Begin an epoch with a new hub of the driver."""
        self.hub.close()
        self.hub = Hub(self.context, RUN, decode_for_driver)
        self.hub.advance(epoch)
        self.hub.bind(self.address)
        for sender in senders:
            self.hub.expect(sender)
        self.hub.start(self.messages.extend, lambda sender, cause: self.lost.append(sender))
        self.proxies.begin(epoch, self.address, dict.fromkeys(senders, self.frames.append))

    def close(self) -> None:
        self.proxies.close()
        self.hub.close()
        self.context.term()


@pytest.fixture
async def end(tmp_path: Path) -> AsyncIterator[DriverEnd]:
    driver_end = DriverEnd(tmp_path)
    yield driver_end
    driver_end.close()


async def test_messages_pass_in_order_in_both_directions(end: DriverEnd) -> None:
    end.begin(3, 7, 8)
    end.connect(3, 7, 8)
    for number in range(200):
        end.proxies.on_frame(StageFrame(7 + number % 2, 3, encode(GrammarReady(number))))
    await until(lambda: len(end.messages) == 202)
    for sender in (7, 8):
        own = [message for source, message in end.messages if source == sender]
        numbers = range(sender - 7, 200, 2)
        assert own == [Hello(sender), *(GrammarReady(number) for number in numbers)]
    payloads = [encode(RegisterSequences(number, 3)) for number in range(200)]
    for payload in payloads:
        end.hub.send_encoded((8,), payload)
    await until(lambda: len(end.frames) == 200)
    assert end.frames == [StageFrame(8, 3, payload) for payload in payloads]
    assert decode_for_stage(payloads[1]) == RegisterSequences(1, 3)


async def test_large_messages_pass(end: DriverEnd) -> None:
    end.begin(1, 7)
    message = GrammarReady(1, "long error " * 300_000)
    end.proxies.on_frame(StageFrame(7, 1, encode(message)))
    await until(lambda: len(end.messages) == 2)
    assert end.messages[1] == (7, message)


async def test_the_address_is_not_needed_once_all_have_connected(
    end: DriverEnd, tmp_path: Path
) -> None:
    end.begin(1, 7, 8)
    end.connect(1, 7, 8)
    await until(lambda: len(end.messages) == 2)
    (tmp_path / "driver").unlink()
    end.proxies.on_frame(StageFrame(8, 1, encode(GrammarReady(1))))
    await until(lambda: (8, GrammarReady(1)) in end.messages)


async def test_frames_of_other_epochs_and_workers_are_dropped(end: DriverEnd) -> None:
    end.begin(1, 7)
    end.proxies.on_frame(StageFrame(7, 1, encode(GrammarReady(1))))
    await until(lambda: len(end.messages) == 2)
    end.begin(2, 7)
    for epoch, sender in [(1, 7), (3, 7), (2, 9)]:
        end.proxies.on_frame(StageFrame(sender, epoch, encode(GrammarReady(2))))
    assert end.proxies.num_stale == 3
    end.proxies.on_frame(StageFrame(7, 2, encode(GrammarReady(3))))
    await until(lambda: (7, GrammarReady(3)) in end.messages)
    assert (7, GrammarReady(2)) not in end.messages


async def test_ends_are_noticed_on_both_sides(end: DriverEnd) -> None:
    end.begin(1, 7, 8)
    end.connect(1, 7, 8)
    await until(lambda: len(end.messages) == 2)
    # The worker's node is lost.
    end.proxies.forget(7)
    await until(lambda: end.lost == [7])
    # The driver has died; frames that were under way go nowhere.
    end.hub.close()

    def is_dropped() -> bool:
        end.proxies.on_frame(StageFrame(8, 1, encode(GrammarReady(1))))
        return end.proxies.num_stale > 0

    await until(is_dropped)
    assert end.proxies.num_stale == 1


async def test_a_frame_that_no_stage_may_send_ends_its_session_with_the_driver(
    end: DriverEnd,
) -> None:
    end.begin(1, 7, 8)
    end.connect(1, 7, 8)
    await until(lambda: len(end.messages) == 2)
    end.proxies.on_frame(StageFrame(7, 1, b"\xc1"))
    await until(lambda: end.lost == [7])
    assert end.hub.num_malformed == 1
    end.proxies.on_frame(StageFrame(8, 1, encode(GrammarReady(1))))
    await until(lambda: (8, GrammarReady(1)) in end.messages)
