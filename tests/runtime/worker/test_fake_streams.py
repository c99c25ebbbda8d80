"""The fake device finds what it is there to find, and lets pass what is in order."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import HiddenSync, Race

SEEDS = range(3)


@pytest.fixture(params=SEEDS)
def queues(request: pytest.FixtureRequest) -> Iterator[FakeQueues]:
    with FakeQueues(request.param) as made:
        yield made


def ones(queues: FakeQueues) -> torch.Tensor:
    """[4] float32 in pinned memory."""
    return queues.allocate_pinned((4,), torch.float32).fill_(1.0)


def test_waits_make_an_order(queues: FakeQueues) -> None:
    first, second, copied, summed = (
        *(queues.stream() for _ in range(2)),
        queues.event(),
        queues.event(),
    )
    source, device, result = ones(queues), queues.zeros((4,), torch.float32), ones(queues)
    with first.current():
        device.copy_(source)
    first.record(copied)
    second.wait(copied)
    with second.current():
        result.copy_(device + 1)
    second.record(summed)
    summed.synchronize()
    assert result.tolist() == [2.0] * 4


def test_a_stream_that_does_not_wait_races(queues: FakeQueues) -> None:
    device, source = queues.zeros((4,), torch.float32), ones(queues)
    with queues.stream().current():
        device.copy_(source)

    def unordered() -> None:
        with queues.stream().current():
            device.add_(1)
        queues.synchronize()

    with pytest.raises(Race):
        unordered()


def test_a_host_that_does_not_wait_races(queues: FakeQueues) -> None:
    device, target = queues.zeros((4,), torch.float32), ones(queues)
    stream = queues.stream()

    def unordered() -> None:
        with stream.current():
            target.copy_(device)
        target.tolist()
        queues.synchronize()

    with pytest.raises(Race):
        unordered()


def test_memory_that_is_refilled_too_early_races(queues: FakeQueues) -> None:
    device, source = queues.zeros((4,), torch.float32), ones(queues)

    def unordered() -> None:
        with queues.stream().current():
            device.copy_(source)
        source.fill_(2.0)
        queues.synchronize()

    with pytest.raises(Race):
        unordered()


def test_threads_of_the_host_are_in_order_by_what_they_hand_over(queues: FakeQueues) -> None:
    buffer = queues.allocate_pinned((4,), torch.float32)
    with queues.thread("a"):
        buffer.fill_(1.0)
    queues.hand_over("a", "b")
    with queues.thread("b"):
        assert buffer.tolist() == [1.0] * 4
        buffer.fill_(2.0)
    with queues.thread("a"), pytest.raises(Race):
        buffer.tolist()


def test_results_come_late() -> None:
    """Without its wait the host reads poison, or what was there before."""
    with FakeQueues(eagerness=0, checks=False) as queues:
        target, stream = ones(queues), queues.stream()
        with stream.current():
            target.copy_(queues.zeros((4,), torch.float32))
        assert target.tolist() == [1.0] * 4
        queues.synchronize()
        assert target.tolist() == [0.0] * 4


def test_a_look_into_the_device_is_found(queues: FakeQueues) -> None:
    device, pageable = queues.zeros((4,), torch.float32), torch.ones(4)
    with queues.stream().current():
        total = device.sum()
        with pytest.raises(HiddenSync):
            total.item()
        with pytest.raises(HiddenSync):
            device.nonzero()
        with pytest.raises(HiddenSync):
            device.copy_(pageable)
    with pytest.raises(Race):
        device.add_(1)


@pytest.mark.parametrize(
    "look",
    [
        lambda numbers: numbers.max().item(),
        lambda numbers: int(numbers.max()),
        lambda numbers: bool((numbers > 0).any()),
        lambda numbers: [1, 2][numbers.long().sum()],
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.masked_select(numbers > 0),
        lambda numbers: numbers.nonzero(),
        lambda numbers: torch.where(numbers > 0),
        lambda numbers: numbers.unique(),
        lambda numbers: numbers.repeat_interleave(numbers.long()),
        lambda numbers: numbers.tolist(),
        lambda numbers: numbers.numpy(),
        lambda numbers: numbers.__setitem__(numbers > 0, torch.ones(4)),
        lambda numbers: numbers.split(numbers.long().tolist()),
    ],
)
def test_whatever_depends_on_a_number_of_the_device_is_found(
    look: Callable[[torch.Tensor], object],
) -> None:
    with FakeQueues() as queues:
        numbers = queues.zeros((4,), torch.float32)
        with queues.stream().current(), pytest.raises(HiddenSync):
            look(numbers)


def test_a_graph_is_what_was_recorded() -> None:
    """Its memory and the host's numbers are those of the recording."""
    with FakeQueues(3) as queues:
        device, target = queues.zeros((4,), torch.float32), ones(queues)
        stream, done = queues.stream(), queues.event()
        added, made = 2.0, []
        graph = queues.capture(stream, lambda: made.append((device + added).view(2, 2)))
        added = 100.0
        for expected in (2.0, 3.0):
            with stream.current():
                graph.replay()
                target.copy_(made[0].flatten())
                device.fill_(1.0)
            stream.record(done)
            done.synchronize()
            assert target.tolist() == [expected] * 4


def test_a_replay_too_early_races() -> None:
    with FakeQueues(3) as queues:
        device, target = queues.zeros((4,), torch.float32), ones(queues)
        stream, other, made, done = queues.stream(), queues.stream(), [], queues.event()
        graph = queues.capture(stream, lambda: made.append(device + 1))
        with stream.current():
            graph.replay()
        stream.record(done)
        other.wait(done)
        with other.current():
            target.copy_(made[0])

        def again() -> None:
            with stream.current():
                graph.replay()
            queues.synchronize()

        with pytest.raises(Race):
            again()
