"""A job's requests, moved by hand: when deltas are taken, in which order, and what goes wrong."""

import asyncio
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import OutputDelta
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.metrics import Metrics
from gllm.frontend.request_run import PreparedRequest, RequestRun


class ByHand:
    """A request that brings what a test says."""

    def __init__(self, prompt):
        self.prompt = prompt
        self.closed = 0
        self._deltas = []

    def set_listener(self, listener):
        self._listener = listener

    def pop_deltas(self):
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self):
        self.closed += 1

    def bring(self, *deltas):
        was_empty = not self._deltas
        self._deltas += deltas
        if was_empty:
            self._listener()


class Engine:
    """Takes every request."""

    def __init__(self, fake):
        self.requests = []
        self.metrics = Metrics(fake)

    async def submit(self, prompts, params, **_):
        self.requests = [ByHand(prompt) for prompt in prompts]
        return self.requests


@pytest.fixture
def hand(engine):
    return Engine(engine)


def run_of(hand, prompts=1, n=1, **job):
    made = PreparedRequest(
        CompletionFields(), [[5, i] for i in range(prompts)], SamplingParams(n=n), **job
    )
    return closing(RequestRun(hand, hand.metrics, made, "id", 0.0))


async def pouring(run, push):
    """The task that pours, begun."""
    task = asyncio.create_task(run.stream_to(push))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def extend(items: list[Any], more: Iterable[Any]) -> bool:
    """Append to a list; True."""
    items.extend(more)
    return True


def token(text, index=0, reason=None):
    return OutputDelta(index, text, [7], reason)


async def test_deltas_are_taken_within_the_call_that_brings_them(hand):
    with run_of(hand) as run:
        await run.start()
        (request,) = hand.requests
        seen: list[str] = []
        task = await pouring(run, lambda: extend(seen, (d.text for d in run.pop_deltas())))
        request.bring(token("a"))
        assert seen == ["a"], "before any task has had a turn"
        request.bring(token("b"), token("c", reason="stop"))
        assert seen == ["a", "b", "c"]
        assert not run.num_running
        await task
    assert request.closed == 1


async def test_what_comes_while_nobody_takes_is_kept(hand):
    with run_of(hand) as run:
        await run.start()
        (request,) = hand.requests
        request.bring(token("a"))
        seen: list[str] = []
        await run.stream_to(lambda: not extend(seen, (d.text for d in run.pop_deltas())))
        assert seen == ["a"], "once, for it says False"
        request.bring(token("b"))
        request.bring(token("c"))
        assert seen == ["a"]
        await run.stream_to(lambda: not extend(seen, (d.text for d in run.pop_deltas())))
        assert seen == ["a", "b", "c"]
        task = await pouring(run, bool)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        request.bring(token("d"))
        assert [d.text for d in run.pop_deltas()] == ["d"]


async def test_choices_of_several_prompts_are_counted_through(hand):
    with run_of(hand, prompts=3, n=2) as run:
        await run.start()
        assert [request.prompt for request in hand.requests] == [[5, 0], [5, 1], [5, 2]]
        seen: list[tuple[int, str]] = []
        task = await pouring(
            run, lambda: extend(seen, ((d.index, d.text) for d in run.pop_deltas()))
        )
        hand.requests[2].bring(token("a", 1, "stop"))
        hand.requests[0].bring(token("b", 0, "stop"), token("c", 1, "length"))
        hand.requests[1].bring(token("d", 0, "stop"), token("e", 1, "stop"))
        assert seen == [(5, "a"), (0, "b"), (1, "c"), (2, "d"), (3, "e")]
        assert not task.done()
        hand.requests[2].bring(token("f", 0, "stop"))
        await task
        assert seen[-1] == (4, "f")
        assert [record.finish_reasons for record in run.prompt_metrics] == [
            ["stop", "length"],
            ["stop", "stop"],
            ["stop", "stop"],
        ]


async def test_what_goes_wrong_while_taking_is_raised_by_who_pours(hand):
    with run_of(hand) as run:
        await run.start()
        task = await pouring(run, lambda: 1 // 0)
        hand.requests[0].bring(token("a"))
        hand.requests[0].bring(token("b"))
        with pytest.raises(ZeroDivisionError):
            await task
    assert hand.requests[0].closed == 1


async def test_of_a_job_that_generates_nothing_only_the_end_is_shown(hand):
    with run_of(hand, returns_output=False) as run:
        await run.start()
        task = await pouring(run, lambda: False)
        hand.requests[0].bring(OutputDelta(0, "x", [7], "stop", "x"))
        await task
        assert run.pop_deltas() == [OutputDelta(0, "", [], "length")]
        assert not run.num_running
