"""Grants: data by which a decode engine fetches KV blocks from the prefill engine.

A router passes a grant from one engine to the other as text. It cannot change the text, which is
signed with the control key of both engines.
"""

import base64
import binascii
import hashlib
import hmac
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.handoff import Ticket

VERSION = 1
_MAC_BYTES = 32
_DIGEST_BYTES = 16
MAX_GRANT_CHARACTERS = 2**20
"""Longest grant that is read; endpoints of many workers are the largest part."""


class GrantError(Exception):
    """Error of a text that does not permit fetching KV blocks: malformed or wrongly signed."""


class HeldPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt whose KV blocks the prefill engine keeps for a limited time, to be fetched."""

    ticket: Ticket
    num_tokens: Annotated[int, Meta(ge=1)]
    """Number of leading prompt tokens whose KV is kept."""
    digest: bytes
    """Hash of these tokens; see `digest_tokens`."""
    num_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens that the prefill engine had in its prefix cache."""


class KvGrant(msgspec.Struct, frozen=True, array_like=True):
    """Permission for a decode engine to fetch a request's KV blocks from the prefill engine.

    Contains the address, tickets and token counts. The router passes it on as signed text, for
    example in `kv_transfer_params`.
    """

    version: int
    engine: str
    """Name of the prefill engine."""
    run: int
    """Random number of the prefill engine's start, by which a restarted engine is recognized."""
    digest: str
    """Hash of weights, dtypes and kernels; the KV of engines with equal hashes is equal."""
    endpoint: bytes
    """Encoded address and layout of the prefill engine's KV cache."""
    prompts: list[HeldPrompt | None]
    """Kept KV blocks of each prompt of the request; None for a prompt without any."""


def digest_tokens(token_ids: Sequence[int]) -> bytes:
    """Return a BLAKE2b hash of token ids, by which engines recognize equal prompts."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class GrantSealer:
    """Signs and verifies KV grants, the texts that permit a decode engine to fetch KV blocks.

    Also signs the decode engine's requests for grants. Signatures are HMACs with control keys,
    which the engines share.

    Args:
        keys: Control keys, at least one; the first one signs and all are accepted.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._secrets = [hashlib.sha256(b"gllm hand-off\0" + key.encode()).digest() for key in keys]

    def seal(self, grant: KvGrant) -> str:
        """Return a grant as signed Base64 text."""
        body = msgspec.msgpack.encode(grant)
        return base64.urlsafe_b64encode(self._sign(b"grant\0" + body) + body).decode()

    def unseal(self, text: str) -> KvGrant:
        """Verify a text and return its grant. Raises GrantError."""
        if len(text) > MAX_GRANT_CHARACTERS:
            raise GrantError("the grant is too long")
        try:
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise GrantError("the grant is not printable text of an engine") from None
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not self._is_signed(b"grant\0" + body, mac):
            raise GrantError("the grant is not of an engine with this control key")
        try:
            grant = msgspec.msgpack.decode(body, type=KvGrant)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise GrantError(f"the grant cannot be read: {error}") from None
        if grant.version != VERSION:
            raise GrantError(f"the grant has version {grant.version}, not {VERSION}")
        return grant

    def prove(self, room: int) -> str:
        """Return the signature of a request for the grant of a `bootstrap_room`.

        The key itself is not sent, because a client names the receiver.
        """
        return self._sign(_room_message(room)).hex()

    def check_proof(self, room: int, proof: str) -> bool:
        """Return True if a signature is that of `prove`."""
        try:
            return self._is_signed(_room_message(room), bytes.fromhex(proof))
        except ValueError:
            return False

    def _sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secrets[0], message, "sha256")

    def _is_signed(self, message: bytes, mac: bytes) -> bool:
        is_equal = False
        for secret in self._secrets:
            is_equal |= hmac.compare_digest(mac, hmac.digest(secret, message, "sha256"))
        return is_equal


def _room_message(room: int) -> bytes:
    return b"room\0" + str(room).encode()
