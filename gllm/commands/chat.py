"""`gllm chat`: a conversation with a running server, in the terminal.

Owns the dialogue: history, commands, interruption. Knows of the server only its URL and OpenAI's
streaming format.
"""

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

from gllm.config.flags import FlagParser, FlagType, number_type, parse_url
from gllm.config.options import INT32_MAX
from gllm.config.server import check_api_key

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/clear forgets the conversation, /quit leaves, Ctrl-C stops an answer"
Message = dict[str, str]


class ServerError(Exception):
    """The server cannot be reached, or refused."""


class Client:
    """A server's chat endpoint."""

    def __init__(self, url: str, options: dict[str, Any], api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._options = options
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """The served model's name. Raises ServerError."""
        with self._open("/v1/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError(f"{self._url} does not speak OpenAI's API") from error

    def stream(self, messages: list[Message]) -> Generator[dict[str, Any], None, None]:
        """The chunks of an answer; closing the iterator stops it. Raises ServerError."""
        body = {
            **self._options,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                field, _, data = line.decode().strip().partition(": ")
                if data == "[DONE]":
                    return
                if field == "data":
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerError(chunk["error"]["message"])
                    yield chunk

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._key}
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(_reason(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(
                f"no server answers at {self._url} ({error}): start one with `gllm serve`, "
                "or name another with --url"
            ) from error


def answer(client: Client, history: list[Message]) -> str:
    """Print an answer while it comes, its reasoning first, then its speed; Ctrl-C stops it. What is
    remembered is the answer alone. Raises ServerError."""
    text, tokens, first, thinks = "", 0, None, False
    stream = client.stream(history)
    try:
        for chunk in stream:
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                thought, piece = delta.get("reasoning") or "", delta.get("content") or ""
                if (thought or piece) and first is None:
                    first = time.monotonic()
                if piece and thinks:
                    print("\n")
                thinks = bool(thought) or (thinks and not piece)
                text += piece
                print(thought + piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer is not of OpenAI's API: {error!r}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerError(f"the answer broke off: {error}") from error
    finally:
        stream.close()
    print()
    if first is not None and tokens > 1:
        speed = (tokens - 1) / max(time.monotonic() - first, 1e-6)
        print(f"[{tokens} tokens, {speed:.1f} tokens/s]")
    return text


def converse(client: Client, system: str | None) -> None:
    """The dialogue, until /quit or the end of input."""
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line == "/clear":
            history = list(opening)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                history.append({"role": "assistant", "content": answer(client, history)})
            except ServerError as error:
                history.pop()
                print(f"error: {error}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's flags."""
    parser = FlagParser(prog="gllm chat", description=HELP)
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=FlagType(parse_url),
        help=f"the server (default {DEFAULT_URL})",
    )
    parser.add_argument("--api-key", help="default: $GLLM_API_KEY")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument(
        "--temperature", type=number_type(float, ge=0, le=2), help="default: the model's"
    )
    parser.add_argument(
        "--max-tokens",
        type=number_type(int, ge=1, le=INT32_MAX),
        help="of each answer; default: the context",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `gllm chat`; 1 where no server answers."""
    arguments = make_parser().parse_args(argv)
    given = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    api_key = arguments.api_key or os.environ.get("GLLM_API_KEY", "").split(",")[0]
    client = Client(arguments.url, options, api_key)
    try:
        if api_key:
            check_api_key(api_key, "--api-key or $GLLM_API_KEY")
        print(f"{client.model()} at {arguments.url}. {HELP}.")
    except (ServerError, ValueError) as error:
        print(f"gllm chat: {error}", file=sys.stderr)
        return 1 if isinstance(error, ServerError) else 2
    _edit_lines()
    converse(client, arguments.system)
    return 0


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says about its refusal."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"


def _edit_lines() -> None:
    """Give `input` a history and editing, where the platform has them."""
    try:
        import readline  # noqa: F401 (importing it is its effect)
    except ImportError:
        return
