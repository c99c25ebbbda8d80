"""Requests under way, as the parent sees them."""

import asyncio

from gllm.messages import Abort, Sampling, Submit, Tokens
from gllm.runtime.client import EngineClient
from gllm.scheduler.plan import End, First, Outcome, Stats


class Sent(list):
    """A link that keeps what is sent."""

    def send(self, message):
        self.append(message)


def connected():
    client = EngineClient()
    client.connect(Sent())
    return client, client._driver


def brings(client, seq, *tokens, ends=()):
    for token in tokens:
        client.hear(Tokens(Outcome([seq], [token], [First(seq, 1, 0.5)], []), Stats()))
    client.hear(Tokens(Outcome([], [], [], list(ends)), Stats()))


async def test_a_slow_reader_gets_all_at_once():
    client, sent = connected()
    stream = client.submit([5], Sampling(), 8, [])
    assert isinstance(sent[0], Submit)
    brings(client, 0, 1, 2, 3)
    assert (await stream.take())[0].tokens == [1, 2, 3]
    brings(client, 0, 4, ends=[End(0, "length")])
    piece = (await stream.take())[0]
    assert (piece.tokens, piece.end.reason) == ([4], "length")


async def test_a_waiting_reader_is_woken_by_what_comes():
    client, _ = connected()
    stream = client.submit([5], Sampling(), 8, [])
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    brings(client, 0, 7)
    assert (await waiting)[0].tokens == [7]


async def test_a_reader_that_gave_up_keeps_nothing_from_the_next():
    client, _ = connected()
    stream = client.submit([5], Sampling(), 8, [])
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    brings(client, 0, 7)
    assert (await stream.take())[0].tokens == [7]


async def test_requests_end_by_their_id():
    client, sent = connected()
    mine = client.submit([5], Sampling(), 8, [], n=2, request_id="mine")
    other = client.submit([5], Sampling(), 8, [], request_id="other")
    brings(client, 0, 7)
    assert client.end("nobody") == 0
    assert client.end("mine") == 1
    assert sent[-1] == Abort([0, 1])
    pieces = await mine.take()
    assert pieces[0].tokens == [7]
    assert [pieces[choice].end.reason for choice in (0, 1)] == ["abort", "abort"]
    assert client.end(None) == 1
    assert (await other.take())[0].end.reason == "abort"
    client.release(mine)
    client.release(other)
    assert client.num_requests == 0
    assert len(sent) == 4, "what has ended is not aborted again"
