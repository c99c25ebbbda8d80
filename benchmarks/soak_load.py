"""Load of a soak test: streams whose text is known, aborts, slow readers and bad requests."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from benchmarks.recovery import make_prompts
from benchmarks.soak_bad_requests import BAD_REQUESTS, RAW_REQUESTS, send_bad, send_raw
from gllm.commands.bench.client import StreamChunk
from gllm.deploy.server_client import DONE, EventReader, error_message

REQUEST_SECONDS = 600.0
"""Maximum time of a request, recoveries included; a longer one is lost."""
SLOW_BUFFER = 4096
"""Bytes that a slow reader and its socket hold, so that the server has to wait."""
SLOW_SECONDS = 0.2
"""Maximum time between two reads of a slow reader."""
SHARES = {"stream": 0.45, "abort": 0.2, "slow": 0.1, "whole": 0.1, "bad": 0.15}
"""Shares of the kinds of requests."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 8, "maxLength": 40}},
    "required": ["name"],
    "additionalProperties": False,
}


class PlannedText(NamedTuple):
    """A greedy request, which has one right text."""

    path: str
    fields: dict[str, Any]


def plan_texts(count: int, max_tokens: int) -> list[PlannedText]:
    """Return different requests: completions and chats of several lengths, some with a grammar."""
    chooser = random.Random(0)
    texts = []
    for number, prompt in enumerate(make_prompts(count, 30, seed=1)):
        fields: dict[str, Any] = {
            "max_tokens": chooser.randrange(max_tokens // 4, max_tokens + 1),
            "temperature": 0,
        }
        if number % 2:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if number % 8 == 3:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "animal", "schema": SCHEMA},
            }
        else:
            fields["ignore_eos"] = True
        texts.append(PlannedText(CHAT if number % 2 else COMPLETIONS, fields))
    return texts


class RequestLostError(Exception):
    """A request that ended without its whole answer; the message is the cause."""


@dataclass
class LoadTally:
    """Counts of a load."""

    num_sent: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    num_identical: int = 0
    """Answers with the text of the undisturbed run."""
    differing: list[str] = field(default_factory=list)
    """Answers with another text."""
    lost: list[str] = field(default_factory=list)
    """Causes of answers that did not end."""
    num_aborted: int = 0
    """Requests whose client went away before the end."""
    refused: Counter[str] = field(default_factory=Counter)
    """Bad requests that were refused, by name."""
    accepted: list[str] = field(default_factory=list)
    """Bad requests with a wrong answer."""


class SoakLoad:
    """Streams to a server: each worker of the load sends one request after the other.

    Args:
        url: Of the server.
        num_streams: Requests at once.
        texts: The requests with known texts.
        seed: Of the random choices.
    """

    def __init__(self, url: str, num_streams: int, texts: Sequence[PlannedText], seed: int) -> None:
        self.tally = LoadTally()
        self._url = url
        self._num_streams = num_streams
        self._texts = texts
        self._references: list[str] = []
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False

    async def record_references(self) -> None:
        """Record the texts of an undisturbed server, one request at a time.

        Raises:
            RequestLostError: A request failed.
        """
        async with open_session() as session:
            for planned in self._texts:
                self._references.append(await read_stream(session, self._url, planned) or "")

    def start(self) -> None:
        """Begin to send."""
        self._is_stopped = False
        self._tasks = [
            asyncio.create_task(self._send_requests(self._random.randrange(2**32)))
            for _ in range(self._num_streams)
        ]

    async def stop(self) -> None:
        """Send no more requests; return when all answers have ended."""
        self._is_stopped = True
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def _send_requests(self, seed: int) -> None:
        chooser = random.Random(seed)
        kinds, weights = list(SHARES), list(SHARES.values())
        async with open_session() as session, open_session(SLOW_BUFFER) as slow_session:
            while not self._is_stopped:
                kind = chooser.choices(kinds, weights)[0]
                self.tally.num_sent[kind] += 1
                if kind == "bad":
                    await self._send_bad(session, chooser)
                    continue
                index = chooser.randrange(len(self._texts))
                try:
                    async with asyncio.timeout(REQUEST_SECONDS):
                        await self._send_text(
                            kind, index, slow_session if kind == "slow" else session, chooser
                        )
                except TimeoutError:
                    self.tally.lost.append(f"{kind}: no end in {REQUEST_SECONDS:.0f} s")
                except RequestLostError as error:
                    self.tally.lost.append(f"{kind}: {error}")

    async def _send_text(
        self, kind: str, index: int, session: aiohttp.ClientSession, chooser: random.Random
    ) -> None:
        """Send a request of a kind and compare its text; raises RequestLostError."""
        planned = self._texts[index]
        if kind == "whole":
            text: str | None = await read_whole(session, self._url, planned)
        elif kind == "slow":
            text = await read_stream(
                session, self._url, planned, lambda: chooser.uniform(0, SLOW_SECONDS)
            )
        elif kind == "abort":
            text = await self._abort(session, planned, chooser)
        else:
            text = await read_stream(session, self._url, planned)
        if text is None:
            self.tally.num_aborted += 1
        elif text == self._references[index]:
            self.tally.num_identical += 1
        else:
            self.tally.differing.append(f"{kind} {index}: {text!r}")

    async def _send_bad(self, session: aiohttp.ClientSession, chooser: random.Random) -> None:
        """Send one of the bad requests and count if it is refused."""
        name = chooser.choice([*BAD_REQUESTS, *RAW_REQUESTS])
        if name in BAD_REQUESTS:
            problem = await send_bad(session, self._url, BAD_REQUESTS[name])
        else:
            problem = await send_raw(self._url, RAW_REQUESTS[name])
        if problem:
            self.tally.accepted.append(f"{name}: {problem}")
        else:
            self.tally.refused[name] += 1

    async def _abort(
        self, session: aiohttp.ClientSession, planned: PlannedText, chooser: random.Random
    ) -> str | None:
        """Send a request and disconnect in mid-stream; return its text if it ended before."""
        num_reads = chooser.randrange(0, planned.fields["max_tokens"])
        if num_reads > 1:
            return await read_stream(session, self._url, planned, num_reads=num_reads)
        try:
            async with asyncio.timeout(chooser.uniform(0, 0.5)):
                return await read_stream(session, self._url, planned)
        except TimeoutError:
            return None


def open_session(buffer: int = 0) -> aiohttp.ClientSession:
    """Return a session with a connection per request and, if not 0, a small receive buffer."""

    def make_socket(address: Any) -> socket.socket:
        made = socket.socket(*address[:3])
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        return made

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, socket_factory=make_socket),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=buffer or 2**16,
    )


async def read_whole(session: aiohttp.ClientSession, url: str, planned: PlannedText) -> str:
    """Send a request whose answer is not streamed; return its text.

    Raises:
        RequestLostError: The answer is no completion.
    """
    try:
        async with session.post(url + planned.path, json=planned.fields) as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise RequestLostError(repr(error)) from None
    if response.status != 200:
        raise RequestLostError(f"HTTP {response.status}: {body[:200]!r}")
    (choice,) = msgspec.json.decode(body)["choices"]
    return choice["text"] if planned.path == COMPLETIONS else choice["message"]["content"]


async def read_stream(
    session: aiohttp.ClientSession,
    url: str,
    planned: PlannedText,
    delay: Callable[[], float] | None = None,
    num_reads: int | None = None,
) -> str | None:
    """Send a request and read its stream.

    Args:
        session: Connections.
        url: Of the server.
        planned: The request.
        delay: Seconds to wait after each read, for a slow reader, which gets larger events too.
        num_reads: Reads after which the client disconnects.

    Returns:
        The text; None if the client disconnected before the end.

    Raises:
        RequestLostError: The stream has an error or no end.
    """
    fields = {**planned.fields, "stream": True}
    if delay is not None:
        is_chat = planned.path == CHAT
        fields |= {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    decode = msgspec.json.Decoder(StreamChunk).decode
    reader = EventReader()
    parts: list[str] = []
    try:
        async with session.post(url + planned.path, json=fields) as response:
            if response.status != 200:
                raise RequestLostError(f"HTTP {response.status}: {(await response.read())[:200]!r}")
            while data := await response.content.readany():
                for event in reader.feed(data):
                    if event == DONE:
                        return "".join(parts)
                    chunk = decode(event)
                    if chunk.error:
                        raise RequestLostError(error_message(chunk.error))
                    parts += [choice.output_text for choice in chunk.choices]
                if num_reads is not None and (num_reads := num_reads - 1) <= 0:
                    return None
                if delay is not None:
                    await asyncio.sleep(delay())
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        raise RequestLostError(repr(error)) from None
    raise RequestLostError(f"the stream ended without [DONE] after {len(parts)} parts")
