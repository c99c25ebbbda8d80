"""Monitor of transfers: which ones are aborted, and the causes that it reports."""

import threading

import pytest

from gllm.transport.base import TransportError
from gllm.transport.transfer_monitor import TransferMonitor
from tests.transport.test_nccl import DirectQueues


class FakeTransfer:
    """A transfer and the event behind it, with the error that it ends with."""

    def __init__(self, error: BaseException | None = None, ended: bool = False) -> None:
        self.error, self.ended = error, ended
        self.is_behind = ended and error is None
        """The stream has got past it."""

    def is_completed(self) -> bool:
        return self.ended

    def exception(self) -> BaseException | None:
        """As of PyTorch 2.13."""
        return self.error

    def query(self) -> bool:
        return self.is_behind

    def finish(self, error: BaseException | None = None) -> None:
        self.__init__(error, True)  # type: ignore[misc]


class TransferOfTorch211(FakeTransfer):
    """Its binding cannot convert what C++ holds, be it nothing."""

    def exception(self) -> BaseException | None:
        raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")


class Aborted:
    def __init__(self) -> None:
        self.times = 0

    def abort(self) -> None:
        self.times += 1


class Watched(TransferMonitor):
    """A monitor whose transfers are their own events, and the errors that it reported."""

    def __init__(self) -> None:
        self.group = Aborted()
        self.faults: list[BaseException] = []
        self.has_reported = threading.Event()
        super().__init__(self.group, 10.0, self.report, check_interval=0.0)

    def report(self, error: BaseException) -> None:
        self.faults.append(error)
        self.has_reported.set()

    def follow(self, step: int, transfer: FakeTransfer, now: float) -> None:
        self.add(step, transfer, transfer, now)  # type: ignore[arg-type]


KINDS = pytest.mark.parametrize("kind", [FakeTransfer, TransferOfTorch211])


@KINDS
def test_a_transfer_that_does_not_end_is_aborted_and_named(kind: type[FakeTransfer]) -> None:
    watch = Watched()
    watch.follow(3, kind(ended=True), 100.0)
    watch.follow(4, kind(), 101.0)
    watch.check_transfers(110.5)
    watch.check()
    watch.check_transfers(111.5)
    assert watch.group.times == 1
    with pytest.raises(TransportError, match="step 4 did not end in 10 s"):
        watch.check()
    watch.check_transfers(200.0)
    assert watch.group.times == 1
    assert [str(fault) for fault in watch.faults] == [watch.abort_reason]


@KINDS
def test_a_transfer_that_fails_is_named(kind: type[FakeTransfer]) -> None:
    watch = Watched()
    watch.follow(7, kind(ended=True), 0.0)
    watch.follow(8, kind(OSError("the peer is gone"), ended=True), 0.0)
    for now in (0.1, 1.1):
        watch.check_transfers(now)
    assert watch.group.times == 1
    why = "the peer is gone" if kind is FakeTransfer else "NCCL_DEBUG=WARN"
    with pytest.raises(TransportError, match=f"step 8 failed: .*{why}"):
        watch.check()
    assert [str(fault) for fault in watch.faults] == [watch.abort_reason]


@KINDS
def test_transfers_that_end_well_are_forgotten(kind: type[FakeTransfer]) -> None:
    """One that is complete a moment before its stream is past it is no failure."""
    watch, transfers = Watched(), [kind() for _ in range(4)]
    for step, transfer in enumerate(transfers):
        watch.follow(step, transfer, 0.0)
    for now, transfer in enumerate(transfers):
        transfer.finish()
        transfer.is_behind = kind is FakeTransfer
        watch.check_transfers(float(now))
        transfer.is_behind = True
    watch.check_transfers(5.0)
    watch.check()
    watch.check_transfers(100.0)
    assert watch.group.times == 0


def test_a_watch_that_fails_breaks_its_edge() -> None:
    class Odd(FakeTransfer):
        def is_completed(self) -> bool:
            raise ValueError("driver shut down")

    watch = Watched()
    watch.follow(1, Odd(), 0.0)
    watch.start()
    assert watch.has_reported.wait(60)
    with pytest.raises(TransportError, match="driver shut down"):
        watch.check()


def test_the_thread_of_a_monitor_uses_its_device() -> None:
    queues, looked = DirectQueues(), threading.Event()

    class Looking(TransferMonitor):
        def check_transfers(self, now: float) -> None:
            looked.set()

    monitor = Looking(Aborted(), 1.0, bind_thread=queues.bind_thread, check_interval=0.0)
    monitor.start()
    assert looked.wait(60)
    monitor.stop()
    assert queues.bound == {"nccl-watch"}


def test_a_stopped_monitor_has_no_thread() -> None:
    before = set(threading.enumerate())
    monitor = TransferMonitor(Aborted(), 1.0)
    monitor.start()
    assert len(set(threading.enumerate()) - before) == 1
    monitor.stop()
    assert not set(threading.enumerate()) - before
