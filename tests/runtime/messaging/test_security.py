"""Secret files: creation, rotation, and files that are refused; the rule for addresses."""

import base64
import os
import stat
from pathlib import Path

import pytest

from gllm.runtime.messaging.security import (
    SECRET_BYTES,
    SecretFile,
    SecretFileError,
    add_secret,
    check_dialed_address,
    check_hub_address,
    create_secret_file,
    derive_keys,
    drop_secret,
    read_secrets,
)

GOOD = bytes(range(7, 7 + 12)) + bytes(byte * byte % 251 for byte in range(3, 23))


def write(path: Path, *node_secrets: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(b"".join(base64.b64encode(each) + b"\n" for each in node_secrets))
    path.chmod(mode)
    return path


def test_new_secret_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        create_secret_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (node_secret,) = read_secrets(path)
    assert len(node_secret) == SECRET_BYTES
    with pytest.raises(FileExistsError):
        create_secret_file(path)
    assert read_secrets(path) == [node_secret]


def test_new_secrets_are_accepted_and_differ(tmp_path: Path) -> None:
    for number in range(200):
        create_secret_file(tmp_path / str(number))
    found = {read_secrets(tmp_path / str(number))[0] for number in range(200)}
    assert len(found) == 200


def test_rotation_adds_a_secret_and_drops_the_first(tmp_path: Path) -> None:
    path, link = tmp_path / "secret", tmp_path / "link"
    create_secret_file(path)
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(SecretFileError, match="only one secret"):
        drop_secret(path)
    (first,) = read_secrets(path)
    add_secret(link)
    kept, second = read_secrets(link)
    assert kept == first
    with pytest.raises(SecretFileError, match="2 secrets already"):
        add_secret(path)
    drop_secret(path)
    assert read_secrets(path) == [second]
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_comments_and_blank_lines_are_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", GOOD)
    path.write_bytes(b"# comment\n\n  " + path.read_bytes().strip() + b"  \r\n\n")
    assert read_secrets(path) == [GOOD]


BAD = {
    "empty": (b"", "0 node secrets"),
    "three": (b"".join(base64.b64encode(os.urandom(32)) + b"\n" for _ in range(3)), "3 node"),
    "twice": (2 * (base64.b64encode(GOOD) + b"\n"), "twice"),
    "short": (base64.b64encode(GOOD[:31]), "line 1: a node secret is 32 random bytes"),
    "no base64": (b"# ok\nhunter2!", "line 2: a node secret"),
    "text": (base64.b64encode(b"correct horse battery staple 123"), "line 1.*not random"),
    "hex": (base64.b64encode(GOOD.hex().encode()[:32]), "not random"),
    "zeros": (base64.b64encode(bytes(32)), "not random"),
    "counted": (base64.b64encode(bytes(range(200, 232))), "not random"),
    "steps": (base64.b64encode(bytes(byte * 7 % 256 for byte in range(32))), "not random"),
    "large": (b"#" * 5000, "too large"),
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_file_is_refused_without_its_content(tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SecretFileError, match=message) as refused:
        SecretFile(path)
    assert str(path) in str(refused.value)
    for line in content.split():
        if len(line) > 8:
            assert line.decode() not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o601])
def test_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "secret", GOOD, mode=mode)
    with pytest.raises(SecretFileError, match=f"mode {mode:04o}.*chmod 600"):
        read_secrets(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_owner_and_group_may_read(tmp_path: Path, mode: int) -> None:
    assert read_secrets(write(tmp_path / "secret", GOOD, mode=mode)) == [GOOD]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretFileError, match="not a regular file"):
        SecretFile(tmp_path / "pipe")
    with pytest.raises(SecretFileError, match="No such file"):
        SecretFile(tmp_path / "nothing")


def test_keys_follow_from_the_secret_alone() -> None:
    keys = derive_keys(GOOD)
    assert derive_keys(GOOD) == keys
    assert derive_keys(bytes(reversed(GOOD))).public != keys.public
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.secret.decode() not in repr(keys)


def test_dials_alternate_and_read_the_file_again(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", GOOD)
    file = SecretFile(path)
    first = file.dial_keys(0)
    assert file.dial_keys(1) == first
    add_secret(path)
    second = derive_keys(read_secrets(path)[1])
    assert [file.dial_keys(failures) for failures in range(3)] == [first, second, first]
    drop_secret(path)
    assert file.dial_keys(0) == second
    # A file that is being replaced: the keys stay.
    path.write_bytes(b"")
    assert file.dial_keys(0) == second


def test_reload_reports_changes_and_keeps_the_keys_on_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", GOOD)
    file = SecretFile(path)
    assert not file.reload()
    add_secret(path)
    assert file.reload()
    keys = file.keys
    path.unlink()
    with pytest.raises(SecretFileError):
        file.reload()
    assert file.keys == keys


LOCAL = ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.9.9.9:1", "ipc://x"]
REMOTE = ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://router:1"]


@pytest.mark.parametrize("check", [check_hub_address, check_dialed_address])
def test_addresses_off_loopback_need_a_secret(check: object) -> None:
    assert callable(check)
    for address in LOCAL:
        check(address, False)
    for address in REMOTE:
        check(address, True)
        with pytest.raises(ValueError, match=r"--new-secret.*--node-secret-file"):
            check(address, False)
