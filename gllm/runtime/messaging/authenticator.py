"""ZAP handler of a hub: admits the connections of those who have the node secret.

Source: ZeroMQ RFC 26 (CurveZMQ) and RFC 27 (ZAP).
"""

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from gllm.runtime.messaging.security import SecretFile, SecretFileError
from gllm.runtime.messaging.session import MAX_ENCRYPTED_BYTES

log = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"gllm"
_NUM_ZAP_FRAMES = 7
"""Version, request id, domain, address, routing id, mechanism and the client's public key."""
RELOAD_SECONDS = 5.0
"""Interval at which the secret file is read again."""


class Authenticator:
    """The only ZAP handler of a context, for a hub whose peers need the node secret.

    A change of the secret file takes effect at its next reading, without a restart.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: SecretFile,
        reload_seconds: float = RELOAD_SECONDS,
    ) -> None:
        """Bind the handler of a context, which does not answer yet.

        Args:
            context: of the hub.
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

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Require the node secret of connections to the addresses that a socket binds from now."""
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
            on_new_keys: called when `protect` has to be applied again to all bound addresses.
        """
        self._on_new_keys = on_new_keys
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        # What arrived before has used up the descriptor's signal.
        self._loop.call_soon(self._read)
        self._timer = self._loop.call_later(self._reload_seconds, self._reload)

    def close(self) -> None:
        """Stop: nobody is admitted from now on."""
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
