"""Encryption that is slow or missing is refused at the start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from gllm.__main__ import main
from gllm.runtime.messaging.security import (
    MAX_CRYPTO_RATIO,
    SecretFile,
    SecretFileError,
    create_secret_file,
    find_crypto_fault,
    measure_crypto_ratio,
)

REAL = zmq.curve_public


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    find_crypto_fault.cache_clear()
    yield
    find_crypto_fault.cache_clear()


def multiply_slowly(key: bytes) -> bytes:
    """As TweetNaCl, 40 times as long as libsodium."""
    for _ in range(40):
        result = REAL(key)
    return result


def test_this_build_is_fast_with_a_margin() -> None:
    assert 0 < measure_crypto_ratio() < MAX_CRYPTO_RATIO / 2
    assert find_crypto_fault() == ""


def fail(key: bytes) -> bytes:
    """As a build without encryption."""
    raise zmq.ZMQError(zmq.ENOTSUP)


@pytest.mark.parametrize(
    ("multiply", "reason"), [(multiply_slowly, "without libsodium"), (fail, "no CURVE encryption")]
)
def test_encryption_that_is_slow_or_missing_is_refused_at_the_start(
    multiply: Callable[[bytes], bytes],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "secret"
    create_secret_file(path)
    monkeypatch.setattr(zmq, "curve_public", multiply)
    with pytest.raises(SecretFileError, match=reason):
        SecretFile(path)
    flags = ["--join", "127.0.0.1:1", "--node-secret-file", str(path)]
    assert main(["node", *flags]) == 2
    assert reason in capsys.readouterr().err
