"""Edges between GPUs of two machines: NCCL where a probe transfer succeeds, else the data movers.

NCCL encrypts nothing, so both machines have to trust their network. Both workers write an offer to
the logs by which they meet; if both offer NCCL, each connects and completes a first transfer, and
writes the outcome. NCCL is used if both outcomes are good. Otherwise the activations go through
host memory and the data movers, and the cause is logged.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gllm.transport.log_store import LogStore
from gllm.transport.rendezvous_log import TransportVerdict

log = logging.getLogger(__name__)

PROBE_SECONDS = 10.0
"""Seconds within which NCCL has to connect and complete a first transfer."""
NOT_TRUSTED = "NCCL encrypts nothing: --trusted-network permits it between these machines"
NO_GPU = "the stage computes on a CPU"
SHARED_GPU = "workers share a GPU, which NCCL does not allow"
SEVERAL_LANES = "NCCL is not used with --lanes 2"
_FOREVER = timedelta(days=365)


def open_remote_end(
    store: LogStore,
    rank: int,
    refusal: str,
    open_nccl: Callable[[], Any],
    open_staged: Callable[[], Any],
    timeout: float = PROBE_SECONDS,
) -> Any:
    """Open one end of a connection between machines, with NCCL if both ends can use it.

    Otherwise activations pass through host memory and the data movers.

    Args:
        store: rendezvous store of both ends.
        rank: SENDER_RANK or RECEIVER_RANK of gllm/transport/nccl.py.
        refusal: reason why this end does not offer NCCL; empty if it does.
        open_nccl: opens the end with NCCL and completes a first transfer.
        open_staged: opens the end without NCCL.
        timeout: limit for `open_nccl` in seconds.

    Raises:
        EdgeClosedError: the connection was cancelled while this end waited for the other one.
    """
    store.set(f"offer {rank}", refusal)
    if refusal:
        store.report(TransportVerdict("tcp", "" if refusal == NO_GPU else refusal))
        return open_staged()
    cause = _receive(store, f"offer {1 - rank}")
    if not cause:
        probe = _Probe(open_nccl)
        own_cause = probe.run(timeout)
        store.set(f"outcome {rank}", own_cause)
        cause = own_cause or _receive(store, f"outcome {1 - rank}")
        if not cause:
            store.report(TransportVerdict("nccl"))
            return probe.end
        probe.abandon()
    log.warning("activations pass through the host and TCP, not NCCL: %s", cause)
    store.report(TransportVerdict("tcp", cause))
    return open_staged()


def _receive(store: LogStore, key: str) -> str:
    """Return a text that the other end writes once its worker has loaded the model."""
    store.wait([key], _FOREVER)
    return store.get(key).decode(errors="replace")


class _Probe:
    """Attempt to open an end with NCCL, which may block for longer than the attempt may take."""

    def __init__(self, open_nccl: Callable[[], Any]) -> None:
        self.end: Any = None
        self._open_nccl = open_nccl
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self, timeout: float) -> str:
        """Return the cause of a failure; empty for none."""
        # NCCL does not return before the other machine has answered; the process may end with this
        # thread in it.
        thread = threading.Thread(target=self._open, name="nccl-probe", daemon=True)
        thread.start()
        thread.join(timeout)
        if self._error is not None:
            return f"NCCL failed: {str(self._error) or type(self._error).__name__}"
        if self.end is None:
            return f"NCCL did not connect in {timeout:g} s; NCCL_DEBUG=INFO logs where it waits"
        return ""

    def abandon(self) -> None:
        """Close the end, now or when it opens after all."""
        with self._lock:
            self._is_abandoned = True
            if self.end is not None:
                self.end.close()

    def _open(self) -> None:
        try:
            end = self._open_nccl()
        except BaseException as error:
            self._error = error
            return
        with self._lock:
            if self._is_abandoned:
                end.close()
            else:
                self.end = end
