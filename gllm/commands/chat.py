"""`gllm chat`: chat with a running server in the terminal, over OpenAI's streaming API."""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Generator
from typing import Any

from gllm.commands.server_command import add_server_flags, make_client, report_failure
from gllm.deploy.server_client import ServerClient, ServerError, error_message, read_events
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import INT32_MAX

HELP = "/clear resets the conversation, /quit exits, Ctrl-C stops an answer"
ChatMessage = dict[str, str]


class ChatClient:
    """Streaming client of /v1/chat/completions.

    Args:
        server: HTTP client of the server.
        options: fields of every request besides model and messages, such as the temperature.
    """

    def __init__(self, server: ServerClient, options: dict[str, Any]) -> None:
        self._server = server
        self._options = options

    def model(self) -> str:
        """Return the name of the served model.

        Raises:
            ServerError: The server cannot be reached or has another API.
        """
        try:
            return str(self._server.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ServerError(f"{self._server.url} has no OpenAI-compatible API") from error

    def stream(self, messages: list[ChatMessage]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of an answer; closing the generator cancels the request.

        Raises:
            ServerError: The request failed.
        """
        body = {
            **self._options,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._server.open("/v1/chat/completions", body) as answer:
            for event in read_events(answer):
                chunk = json.loads(event)
                if "error" in chunk:
                    raise ServerError(error_message(chunk))
                yield chunk


def print_answer(client: ChatClient, history: list[ChatMessage]) -> str:
    """Print the model's answer as it streams, reasoning first, then its speed; Ctrl-C stops it.

    Args:
        client: client of the chat completions endpoint.
        history: messages of the conversation, the new prompt last.

    Returns:
        The text of the answer without its reasoning, for the history.

    Raises:
        ServerError: the request failed or the connection broke.
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
        raise ServerError(f"the answer does not follow OpenAI's API: {error!r}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerError(f"the answer broke off: {error}") from error
    finally:
        stream.close()
    print()
    if first_token_time is not None and num_tokens > 1:
        speed = (num_tokens - 1) / max(time.monotonic() - first_token_time, 1e-6)
        print(f"[{num_tokens} tokens, {speed:.1f} tokens/s]")
    return text


def run_dialogue(client: ChatClient, system: str | None) -> None:
    """Read prompts from the terminal and print answers until /quit or the end of input."""
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
            except ServerError as error:
                history.pop()
                print(f"error: {error}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm chat`."""
    parser = FlagParser(prog="gllm chat", description=HELP)
    add_server_flags(parser)
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
    """Chat with a running server in the terminal.

    Returns:
        The exit status: 1 if no server responds, 2 for invalid flags.
    """
    arguments = make_parser().parse_args(argv)
    fields = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = {name: value for name, value in fields.items() if value is not None}
    try:
        server = make_client(arguments, timeout_seconds=None)
        client = ChatClient(server, options)
        print(f"{client.model()} at {arguments.url}. {HELP}.")
    except (ServerError, ValueError) as error:
        status = report_failure("chat", error)
        if isinstance(error, ServerError) and not error.status:
            print("start a server with `gllm serve`, or set --url", file=sys.stderr)
        return status
    _enable_line_editing()
    run_dialogue(client, arguments.system)
    return 0


def _enable_line_editing() -> None:
    """Enable history and line editing of `input` where the platform supports them."""
    try:
        import readline  # noqa: F401 (the import has the effect)
    except ImportError:
        return
