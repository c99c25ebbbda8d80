"""Node secret: the file that makes processes on several machines members of one fleet.

The file has one or two secrets of 32 random bytes. A CURVE key pair is derived from each; hubs and
dialers use the same one, so that only those who have the secret get past the handshake and
everything on the connection is encrypted. `Authenticator` checks members at a hub. Data connections
use certificates, which travel within these sessions.
"""

import asyncio
import base64
import binascii
import functools
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from gllm.options.addresses import is_loopback
from gllm.runtime.messaging.session import MAX_ENCRYPTED_BYTES

SECRET_BYTES = 32
MAX_SECRETS = 2
"""Secrets in a file: the current one and, while it is replaced, the next one."""
_MAX_FILE_BYTES = 4096
_MIN_DISTINCT = 16
"""Minimum distinct bytes, and distinct differences of neighbours: 32 random bytes have about 30."""
_FILE_HEADER = "# Node secrets of a gllm fleet, 32 random bytes each. Keep them private.\n"
_ADVICE = (
    "create a file with `gllm node --new-secret FILE`, copy it to every machine of the fleet and "
    "pass it with --node-secret-file FILE"
)

log = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"gllm"
_NUM_ZAP_FRAMES = 7
"""Version, request id, domain, address, routing id, mechanism and the client's public key."""
RELOAD_SECONDS = 5.0
"""Interval at which the secret file is read again."""


class SecretFileError(ValueError):
    """The file of the node secret cannot be used; the message does not contain the secret."""


@dataclass(frozen=True)
class KeyPair:
    """CURVE key pair for ZeroMQ's encryption, as text in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def derive_keys(node_secret: bytes) -> KeyPair:
    """Return the CURVE key pair of a node secret: the X25519 key from the secret's BLAKE2b hash."""
    key = z85.encode(blake2b(node_secret, digest_size=32, person=b"gllm-node").digest())
    return KeyPair(zmq.curve_public(key), key)


def create_secret_file(path: Path) -> None:
    """Create a file with one new random node secret that only its owner can read.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        # The umask may have taken the owner's rights.
        os.fchmod(descriptor, 0o600)
        file.write(_FILE_HEADER + _to_line(secrets.token_bytes(SECRET_BYTES)))


def add_secret(path: Path) -> None:
    """Append a new secret to a node-secret file, to replace the old one without a restart.

    It is the first step; `drop_secret` is the last.

    Raises:
        SecretFileError: the file is invalid or has two secrets.
        OSError: the file cannot be read or written.
    """
    present = read_secrets(path)
    if len(present) == MAX_SECRETS:
        raise SecretFileError(
            f"{path} has {MAX_SECRETS} secrets already: remove the first one with "
            "`gllm node --drop-secret` to end the rotation under way"
        )
    _replace(path, [*present, secrets.token_bytes(SECRET_BYTES)])


def drop_secret(path: Path) -> None:
    """Remove the older of two secrets of a node-secret file, after `add_secret`.

    Raises:
        SecretFileError: the file is invalid or has only one secret.
        OSError: the file cannot be read or written.
    """
    present = read_secrets(path)
    if len(present) == 1:
        raise SecretFileError(
            f"{path} has only one secret: add its successor with `gllm node --add-secret` first"
        )
    _replace(path, present[1:])


def read_secrets(path: Path) -> list[bytes]:
    """Return the one or two secrets of a node-secret file, the older one first.

    Raises:
        SecretFileError: the file has no secrets, more than two or weak ones, or users other than
            its owner and group can read it.
        OSError: the file cannot be read.
    """
    # Without waiting, should it be a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SecretFileError(f"{path} is not a regular file")
        if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise SecretFileError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: other users can read or "
                f"change the node secret; run `chmod 600 {path}`"
            )
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise SecretFileError(f"{path} is too large for a file of node secrets")
    found = [
        _decode_line(path, number, line.strip())
        for number, line in enumerate(content.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith(b"#")
    ]
    if not 1 <= len(found) <= MAX_SECRETS:
        raise SecretFileError(f"{path} has {len(found)} node secrets: it has to have one or two")
    if len(set(found)) < len(found):
        raise SecretFileError(f"{path} has the same node secret twice")
    return found


class SecretFile:
    """Key pairs derived from a node-secret file; `reload` reads a file that has changed."""

    def __init__(self, path: Path | str) -> None:
        """Read the file.

        Raises:
            SecretFileError: the file is invalid or cannot be read, or ZeroMQ's encryption is slow.
        """
        if fault := find_crypto_fault():
            raise SecretFileError(fault)
        self.path = Path(path)
        self.keys = self._read()
        """Key pairs of one or two secrets. A hub uses the first one, members may use either."""

    def reload(self) -> bool:
        """Read the file again; return True if its secrets have changed.

        Raises:
            SecretFileError: the file is invalid or cannot be read; the keys stay.
        """
        keys = self._read()
        has_changed = keys != self.keys
        self.keys = keys
        return has_changed

    def dial_keys(self, num_failures: int) -> KeyPair:
        """Return the key pair for the next dial to a hub, from the current file if it is valid.

        Dials alternate between two secrets, because the hub may have one of them only.

        Args:
            num_failures: number of failed dials since the last session with that hub.
        """
        # The start has checked the file; it may be just being replaced.
        with suppress(SecretFileError):
            self.reload()
        return self.keys[num_failures % len(self.keys)]

    def _read(self) -> list[KeyPair]:
        try:
            return [derive_keys(secret) for secret in read_secrets(self.path)]
        except OSError as error:
            cause = error.strerror or error
            raise SecretFileError(f"the node secret file {self.path}: {cause}") from error


def check_hub_address(address: str, has_secret: bool) -> None:
    """Raise ValueError if an address to listen on is open to other machines without a node secret.

    Args:
        address: ZeroMQ address such as tcp://0.0.0.0:29700.
        has_secret: True if the hub requires a node secret.
    """
    if not has_secret and not _is_local(address):
        raise ValueError(
            f"a hub at {address} accepts connections from other machines, which needs a node "
            f"secret: {_ADVICE}"
        )


def check_dialed_address(address: str, has_secret: bool) -> None:
    """Raise ValueError if an address to connect to is on another machine without a node secret.

    Prompts and outputs would leave this machine without encryption.

    Args:
        address: ZeroMQ address such as tcp://router.example:29700.
        has_secret: True if the connection uses a node secret.
    """
    if not has_secret and not _is_local(address):
        raise ValueError(
            f"{address} is not on this machine, and a connection to another one needs a node "
            f"secret: {_ADVICE}"
        )


def _is_local(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    return scheme in ("ipc", "inproc") or is_loopback(rest.rpartition(":")[0].strip("[]"))


def _to_line(node_secret: bytes) -> str:
    return base64.b64encode(node_secret).decode() + "\n"


def _decode_line(path: Path, number: int, line: bytes) -> bytes:
    try:
        node_secret = base64.b64decode(line, validate=True)
    except binascii.Error:
        node_secret = b""
    if len(node_secret) != SECRET_BYTES:
        raise SecretFileError(
            f"{path}, line {number}: a node secret is {SECRET_BYTES} random bytes in base64; "
            "create one with `gllm node --new-secret FILE`"
        )
    if _is_weak(node_secret):
        raise SecretFileError(
            f"{path}, line {number}: the node secret is not random, so it could be guessed from "
            "recorded traffic; create one with `gllm node --new-secret FILE`"
        )
    return node_secret


def _is_weak(node_secret: bytes) -> bool:
    """Return True for text, repetitions and sequences; random bytes fail once in 10^13."""
    following = node_secret[1:]
    steps = {(b - a) % 256 for a, b in zip(node_secret, following, strict=False)}
    is_text = all(0x20 <= byte < 0x7F for byte in node_secret)
    return is_text or len(set(node_secret)) < _MIN_DISTINCT or len(steps) < _MIN_DISTINCT


def _replace(path: Path, node_secrets: Sequence[bytes]) -> None:
    """Replace the file at once, with its owner and mode."""
    path = path.resolve()
    status = path.stat()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            file.write(_FILE_HEADER + "".join(map(_to_line, node_secrets)))
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


MAX_CRYPTO_RATIO = 1.5
"""Largest time of a Curve25519 multiplication over that of a modular power in Python. On one x86
processor libsodium's ratio was 0.2 and TweetNaCl's 7."""
_NUM_ATTEMPTS = 5
_PRIME = 2**255 - 19
_EXPONENT = _PRIME // 3
_KEY = z85.encode(bytes(range(32)))


def measure_crypto_ratio() -> float:
    """Measure how slow ZeroMQ's key exchange (Curve25519) is, to detect builds without libsodium.

    Returns:
        Time of one Curve25519 multiplication over that of a 255-bit modular power in Python, each
            the fastest of several attempts, so that neither processor nor load matter much.

    Raises:
        zmq.ZMQError: ZeroMQ has no encryption.
    """
    power_seconds = _best_seconds(lambda: pow(9, _EXPONENT, _PRIME))
    return _best_seconds(lambda: zmq.curve_public(_KEY)) / power_seconds


@functools.cache
def find_crypto_fault() -> str:
    """Return why ZeroMQ's encryption is missing or too slow, with advice; empty if it is usable."""
    advice = "install the wheel of pyzmq from PyPI, which has libsodium, in place of this build"
    try:
        ratio = measure_crypto_ratio()
    except zmq.ZMQError as error:
        return f"ZeroMQ has no CURVE encryption ({error}): {advice}"
    if ratio <= MAX_CRYPTO_RATIO:
        return ""
    return (
        f"ZeroMQ encrypts without libsodium, so that every message takes longer (a key takes "
        f"{ratio / MAX_CRYPTO_RATIO:.1f} times as long as it may): {advice}"
    )


def _best_seconds(function: Callable[[], object]) -> float:
    """Return the CPU time of the fastest of several calls."""
    best = float("inf")
    for _ in range(_NUM_ATTEMPTS):
        begin = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin)
    return best


class Authenticator:
    """Accepts only ZeroMQ connections with the key of the node secret (a ZAP handler).

    It reads the secret file again periodically, so that a new secret needs no restart.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: SecretFile,
        reload_seconds: float = RELOAD_SECONDS,
    ) -> None:
        """Bind the handler of a context, which does not answer yet.

        Args:
            context: ZeroMQ context of the hub.
            secret: secrets of the members.
            reload_seconds: interval at which the secret file is read again.
        """
        self._secret = secret
        self._reload_seconds = reload_seconds
        self._keys = secret.keys
        """Secrets that are in force; the file's may be newer ones that dials have read."""
        self._error = ""
        """Cause for which the file could not be read the last time."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def require_secret_on_bind(self, socket: zmq.Socket[bytes]) -> None:
        """Require the node secret for the addresses that a socket binds from now on."""
        keys = self._keys[0]
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.zap_domain = _ZAP_DOMAIN
        # Without this, ZeroMQ admits everyone when no handler is bound.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.maxmsgsize = MAX_ENCRYPTED_BYTES

    def start(self, on_new_keys: Callable[[], None]) -> None:
        """Start on the running event loop.

        Args:
            on_new_keys: called when all addresses have to be bound again with new keys.
        """
        self._on_new_keys = on_new_keys
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        # What arrived before has used up the descriptor's signal.
        self._loop.call_soon(self._read)
        self._timer = self._loop.call_later(self._reload_seconds, self._reload)

    def close(self) -> None:
        """Stop answering; later connections are refused."""
        if self._loop is not None and self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()

    def _read(self) -> None:
        """Answer all waiting requests."""
        while self._loop is not None:
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1 + _NUM_ZAP_FRAMES:
                continue
            delimiter, version, request, _domain, _address, _id, mechanism, key = frames
            members = {key.public for key in self._keys}
            is_member = mechanism == b"CURVE" and len(key) == 32 and z85.encode(key) in members
            code, text = (b"200", b"") if is_member else (b"400", b"unknown node secret")
            self._socket.send_multipart(
                [routing_id, delimiter, version, request, code, text, b"", b""], zmq.NOBLOCK
            )

    def _reload(self) -> None:
        if self._loop is None:
            return
        self._timer = self._loop.call_later(self._reload_seconds, self._reload)
        try:
            self._secret.reload()
        except SecretFileError as error:
            if str(error) != self._error:
                log.warning("the node secrets stay as they were: %s", error)
            self._error = str(error)
            return
        self._error = ""
        previous, self._keys = self._keys, self._secret.keys
        if previous != self._keys:
            log.info(
                "%s has changed: %d node secret(s) are in force", self._secret.path, len(self._keys)
            )
        if previous[0] != self._keys[0]:
            self._on_new_keys()


@dataclass(frozen=True)
class NodeCertificate:
    """Self-signed TLS certificate and private key of a machine's data connections."""

    certificate: bytes
    """The certificate in DER, which other machines get."""
    descriptor: int
    """Anonymous file with the key and the certificate in PEM; it is never on a disk."""

    def close(self) -> None:
        """Close the file in this process."""
        os.close(self.descriptor)


def create_certificate() -> NodeCertificate:
    """Create a self-signed TLS certificate with a new P-256 key.

    Its subject is random, because OpenSSL tells trusted certificates of one subject apart only by
    their order. It is valid from 2000 to 9999, so that clocks need not be right.
    """
    # Only engines on several machines need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.NameAttribute(x509.NameOID.COMMON_NAME, f"gllm-{os.urandom(16).hex()}")
    subject = x509.Name([name])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    descriptor = os.memfd_create("gllm-certificate")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
    except BaseException:
        os.close(descriptor)
        raise
    return NodeCertificate(certificate.public_bytes(serialization.Encoding.DER), descriptor)
