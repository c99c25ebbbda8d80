"""`gllm chat`: chat with a running server in the terminal, over OpenAI's streaming API."""

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

from gllm.config.server import check_api_key
from gllm.options.flags import FlagParser, FlagType, number_type, parse_url
from gllm.options.options import INT32_MAX

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/clear resets the conversation, /quit exits, Ctrl-C stops an answer"
ChatMessage = dict[str, str]


class ChatServerError(Exception):
    """The server cannot be reached or returned an error."""


class ChatClient:
    """Client of a server's chat completions endpoint."""

    def __init__(self, url: str, options: dict[str, Any], api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._options = options
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """Return the name of the served model.

        Raises:
            ChatServerError: The server cannot be reached or has another API.
        """
        with self._open("/v1/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatServerError(f"{self._url} has no OpenAI-compatible API") from error

    def stream(self, messages: list[ChatMessage]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of an answer; closing the generator cancels the request.

        Raises:
            ChatServerError: The request failed.
        """
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
                        raise ChatServerError(chunk["error"]["message"])
                    yield chunk

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._key}
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatServerError(_error_message(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatServerError(
                f"no server responds at {self._url} ({error}): start one with `gllm serve`, "
                "or set --url"
            ) from error


def print_answer(client: ChatClient, history: list[ChatMessage]) -> str:
    """Print an answer as it streams, reasoning first, then its speed; Ctrl-C stops it.

    Returns:
        The text of the answer without its reasoning, for the history.

    Raises:
        ChatServerError: The request failed or the connection broke.
    """
    text, num_tokens, first_token_time, in_reasoning = "", 0, None, False
    stream = client.stream(history)
    try:
        for chunk in stream:
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
                if (reasoning or content) and first_token_time is None:
                    first_token_time = time.monotonic()
                if content and in_reasoning:
                    print("\n")
                in_reasoning = bool(reasoning) or (in_reasoning and not content)
                text += content
                print(reasoning + content, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (LookupError, TypeError, AttributeError) as error:
        raise ChatServerError(f"the answer does not follow OpenAI's API: {error!r}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ChatServerError(f"the answer broke off: {error}") from error
    finally:
        stream.close()
    print()
    if first_token_time is not None and num_tokens > 1:
        speed = (num_tokens - 1) / max(time.monotonic() - first_token_time, 1e-6)
        print(f"[{num_tokens} tokens, {speed:.1f} tokens/s]")
    return text


def run_dialogue(client: ChatClient, system: str | None) -> None:
    """Read prompts and print answers until /quit or the end of input."""
    opening: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
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
                history.append({"role": "assistant", "content": print_answer(client, history)})
            except ChatServerError as error:
                history.pop()
                print(f"error: {error}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's flags."""
    parser = FlagParser(prog="gllm chat", description=HELP)
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=FlagType(parse_url),
        help=f"URL of the server (default {DEFAULT_URL})",
    )
    parser.add_argument("--api-key", help="default: $GLLM_API_KEY")
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--temperature", type=number_type(float, ge=0, le=2), help="default: the model's"
    )
    parser.add_argument(
        "--max-tokens",
        type=number_type(int, ge=1, le=INT32_MAX),
        help="maximum tokens of each answer; default: the context length",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `gllm chat` and return the exit status: 1 if no server responds, 2 for bad flags."""
    arguments = make_parser().parse_args(argv)
    fields = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = {name: value for name, value in fields.items() if value is not None}
    api_key = arguments.api_key or os.environ.get("GLLM_API_KEY", "").split(",")[0]
    client = ChatClient(arguments.url, options, api_key)
    try:
        if api_key:
            check_api_key(api_key, "--api-key or $GLLM_API_KEY")
        print(f"{client.model()} at {arguments.url}. {HELP}.")
    except (ChatServerError, ValueError) as error:
        print(f"gllm chat: {error}", file=sys.stderr)
        return 1 if isinstance(error, ChatServerError) else 2
    _enable_line_editing()
    run_dialogue(client, arguments.system)
    return 0


def _error_message(error: urllib.error.HTTPError) -> str:
    """Return the message of a server's error response."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server returned HTTP status {error.code}"


def _enable_line_editing() -> None:
    """Enable history and line editing of `input` where the platform supports them."""
    try:
        import readline  # noqa: F401 (the import has the effect)
    except ImportError:
        return
