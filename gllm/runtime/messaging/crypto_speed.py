"""Speed of ZeroMQ's encryption: a build without libsodium slows each message of a fleet.

ZeroMQ may be built with TweetNaCl, whose field arithmetic is portable C without any optimization:
32 times slower end to end than libsodium (https://github.com/jean-airoldie/libzmq-rs/issues/96).
"""

import functools
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85

MAX_RATIO = 1.5
"""Largest time of a Curve25519 multiplication over that of a modular power in Python. On one x86
processor libsodium's ratio was 0.2 and TweetNaCl's 7."""
_NUM_ATTEMPTS = 5
_PRIME = 2**255 - 19
_EXPONENT = _PRIME // 3
_KEY = z85.encode(bytes(range(32)))


def measure_crypto_ratio() -> float:
    """Return the time of ZeroMQ's Curve25519 multiplication over that of a power in Python.

    Both are of the same size, so the ratio hardly depends on the processor, and of several attempts
    the fastest counts, so it does not depend on the load.

    Raises:
        zmq.ZMQError: ZeroMQ has no encryption.
    """
    power_seconds = _best_seconds(lambda: pow(9, _EXPONENT, _PRIME))
    return _best_seconds(lambda: zmq.curve_public(_KEY)) / power_seconds


@functools.cache
def find_crypto_fault() -> str:
    """Return the reason for which ZeroMQ's encryption cannot be used; empty for none."""
    advice = "install the wheel of pyzmq from PyPI, which has libsodium, in place of this build"
    try:
        ratio = measure_crypto_ratio()
    except zmq.ZMQError as error:
        return f"ZeroMQ has no CURVE encryption ({error}): {advice}"
    if ratio <= MAX_RATIO:
        return ""
    return (
        f"ZeroMQ encrypts without libsodium, so that every message takes longer (a key takes "
        f"{ratio / MAX_RATIO:.1f} times as long as it may): {advice}"
    )


def _best_seconds(function: Callable[[], object]) -> float:
    """Return the CPU time of the fastest of several calls."""
    best = float("inf")
    for _ in range(_NUM_ATTEMPTS):
        begin = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin)
    return best
