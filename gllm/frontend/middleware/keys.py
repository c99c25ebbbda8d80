"""Middleware: API keys, as a bearer token or in x-api-key. All keys have the same rights."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web

from gllm.config.server import ServerConfig, check_api_key
from gllm.frontend.context import CLIENT_ID
from gllm.frontend.endpoint import find_endpoint
from gllm.frontend.errors import ApiError, Handler


class ApiKeys:
    """API keys that the server accepts, stored as SHA-256 digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def index_of(self, key: str) -> int | None:
        """Return the index of an API key, or None if it is not accepted; takes constant time."""
        digest, index = _digest(key), None
        for i, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                index = i
        return index


def read_api_keys(config: ServerConfig) -> ApiKeys:
    """Return the API keys of `--api-key` and of key files, plus the control keys.

    Control keys are those of trusted routers. Without API keys, none are required.

    Raises:
        ValueError: A file cannot be used; the message names the flag.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += read_keys(config.api_key_file, "--api-key-file")
    if keys and config.control_key_file is not None:
        keys += read_keys(config.control_key_file, "--control-key-file")
    return ApiKeys(keys)


def read_keys(path: str, flag: str) -> list[str]:
    """Return the keys in a file: one per line, without empty lines and lines that start with #.

    Args:
        path: Path of the file.
        flag: Flag that names the file, for errors.

    Raises:
        ValueError: The file cannot be used; the message names the flag.
    """
    flag = f"{flag} {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{flag} cannot be read: {why}") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            check_api_key(line, f"{flag}, line {number}")
            keys.append(line)
    if not keys:
        raise ValueError(f"{flag} holds no key: give it one a line")
    return keys


def install(app: web.Application, config: ServerConfig) -> None:
    """Add middleware that rejects requests without a valid API key (401), if keys are configured.

    Raises:
        ValueError: A key file cannot be used; the message names the flag.
    """
    keys = read_api_keys(config)

    @web.middleware
    async def ask_for_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        endpoint = find_endpoint(request)
        # Unknown paths need a key too, so that their absence is not revealed.
        if endpoint is None or not endpoint.is_public:
            request[CLIENT_ID] = f"key {_check(request, keys)}"
        return await handler(request)

    if keys:
        app.middlewares.append(ask_for_key)


def _check(request: web.Request, keys: ApiKeys) -> int:
    """Return the index of a request's key. Raise ApiError if it has no valid key."""
    keys_sent = get_sent_keys(request)
    for key in keys_sent:
        if (index := keys.index_of(key)) is not None:
            return index
    if keys_sent:
        why, code = "This API key is not valid here.", "invalid_api_key"
        challenge = 'Bearer realm="gllm", error="invalid_token"'
    else:
        why = "An API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        code, challenge = "missing_api_key", 'Bearer realm="gllm"'
    raise ApiError(401, why, code=code, headers={"WWW-Authenticate": challenge})


def get_sent_keys(request: web.Request) -> list[str]:
    """Return the API keys in a request's headers `Authorization: Bearer` and `x-api-key`."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    keys = [request.headers["X-Api-Key"]] if "X-Api-Key" in request.headers else []
    return keys + ([token.strip()] if scheme.lower() == "bearer" else [])


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
