"""Encryption that is slow or missing is refused at the start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gllm.__main__ import main
from gllm.runtime.crypto_speed import MAX_RATIO, find_crypto_fault, measure_crypto_ratio
from gllm.runtime.security import SecretFile, SecretFileError, create_secret_file

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
    assert 0 < measure_crypto_ratio() < MAX_RATIO / 2
    assert find_crypto_fault() == ""


def test_slow_encryption_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    create_secret_file(path)
    monkeypatch.setattr(zmq, "curve_public", multiply_slowly)
    with pytest.raises(SecretFileError, match="without libsodium"):
        SecretFile(path)
    flags = ["--join", "127.0.0.1:1", "--node-secret-file", str(path)]
    assert main(["node", *flags]) == 2
    assert "libsodium" in capsys.readouterr().err


def test_missing_encryption_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(key: bytes) -> bytes:
        raise zmq.ZMQError(zmq.ENOTSUP)

    path = tmp_path / "secret"
    create_secret_file(path)
    monkeypatch.setattr(zmq, "curve_public", fail)
    with pytest.raises(SecretFileError, match="no CURVE encryption"):
        SecretFile(path)
