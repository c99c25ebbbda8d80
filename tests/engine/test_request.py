"""Requests of an engine without workers: tokens come by hand."""

import asyncio
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.field_types import FieldError
from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.engine import Engine
from gllm.engine.interface import EngineUnavailableError, PoisonRequestError
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from tests.support.engines.ready import mark_ready

PARAMS = SamplingParams(temperature=0)
CHOICE = SamplingParams(structured=StructuredOutput(choice=("yes", "no")))


@pytest.fixture
async def engine():
    made: Any = Engine(EngineConfig("demo"))
    mark_ready(made)
    made.sent = []
    made._client.attach(made.sent.append)
    yield made
    await made._grammars.close()


def bring(engine, *tokens, ends=()):
    """A step with (sequence, token) pairs."""
    seqs = [seq for seq, _ in tokens]
    firsts = [FirstToken(seq, 2, 0.5) for seq in seqs]
    step = StepOutput(seqs, [token for _, token in tokens], firsts, list(ends))
    engine._client.on_report(EngineOutputs(step, SchedulerStats()))


def ids(engine, text):
    return engine.tokenizer.encode(text, add_special_tokens=False)


async def test_each_prompt_is_a_request(engine):
    one, two = await engine.submit([[5], [6, 7]], PARAMS)
    assert [message.prompt for message in engine.sent] == [[5], [6, 7]]
    word, other = ids(engine, "cat")[0], ids(engine, "dog")[0]
    bring(engine, (0, word), (1, other), ends=[FinishedSequence(1, "length")])
    (delta,) = one.pop_deltas()
    assert (delta.token_ids, delta.cached_tokens, delta.finish_reason) == ([word], 2, None)
    (delta,) = two.pop_deltas()
    assert (delta.token_ids, delta.finish_reason) == ([other], "length")
    assert (one.is_finished, two.is_finished, engine.status().num_requests) == (False, True, 2)
    one.close()
    two.close()
    assert engine.sent[-1] == AbortSequences([0])
    assert engine.status().num_requests == 0


async def test_one_prompt_that_cannot_be_refuses_all(engine):
    with pytest.raises(FieldError):
        await engine.submit([[5], []], PARAMS)
    assert engine.sent == []
    assert engine.status().num_requests == 0


async def test_a_stop_string_ends_its_choice_where_it_is_heard(engine):
    params = SamplingParams(stop=("dog",), n=2)
    (request,) = await engine.submit([[5]], params)
    seen = []
    request.set_listener(lambda: seen.extend(request.pop_deltas()))
    for token in ids(engine, "a dog"):
        bring(engine, (0, token))
    assert "".join(delta.text for delta in seen) == "a "
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", "dog")
    assert engine.sent[-1] == AbortSequences([0])
    bring(engine, (0, 7), (1, 8))
    assert seen[-1].index == 1, "nothing follows the end of a choice"
    request.close()


async def compiling(engine, monkeypatch):
    """A request of two prompts whose grammar is under way for ever."""
    begun = asyncio.Event()

    async def wait(_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._grammars, "compile_structured_output", wait)
    task = asyncio.create_task(engine.submit([[5], [6]], CHOICE, request_id="mine"))
    await begun.wait()
    return task


async def test_abort_reaches_requests_whose_grammar_is_being_compiled(engine, monkeypatch):
    task = await compiling(engine, monkeypatch)
    assert engine.abort("another") == 0
    assert [engine.abort("mine"), engine.abort("mine")] == [1, 0]
    requests = await task
    taken = []
    for request in requests:
        request.set_listener(lambda request=request: taken.append(request.pop_deltas()))
    assert [[delta.finish_reason for delta in deltas] for deltas in taken] == [["abort"]] * 2
    sent = [type(message) for message in engine.sent]
    assert sent == [SubmitRequest, SubmitRequest, AbortSequences, AbortSequences]
    for request in requests:
        request.close()
    assert (engine.status().num_requests, engine.abort(None)) == (0, 0)


async def test_abort_reaches_a_request_whose_grammar_has_just_been_compiled(engine, monkeypatch):
    async def at_once(_):
        assert engine.abort("mine") == 1
        return "grammar"

    monkeypatch.setattr(engine._grammars, "compile_structured_output", at_once)
    (request,) = await engine.submit([[5]], CHOICE, request_id="mine")
    assert [delta.finish_reason for delta in request.pop_deltas()] == ["abort"]
    request.close()


async def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing(engine, monkeypatch):
    task = await compiling(engine, monkeypatch)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.sent, engine.abort(None), engine.status().num_requests) == ([], 0, 0)


async def test_an_engine_that_ends_meanwhile_takes_nothing(engine, monkeypatch):
    async def ends(_):
        engine._supervisor._is_draining = True
        return "grammar"

    monkeypatch.setattr(engine._grammars, "compile_structured_output", ends)
    with pytest.raises(EngineUnavailableError):
        await engine.submit([[5]], CHOICE)
    assert engine.sent == []


def restart(engine, *, is_attached=True):
    """Replace the driver."""
    engine._client.detach("killed")
    engine.sent = []
    if is_attached:
        engine._client.attach(engine.sent.append)


async def test_text_and_stop_strings_go_on_over_a_restart(engine):
    params = SamplingParams(stop=("dog",), n=2, max_tokens=50)
    (request,) = await engine.submit([[5]], params)
    texts = {0: "", 1: ""}
    reasons = {}

    def read():
        for delta in request.pop_deltas():
            texts[delta.index] += delta.text
            reasons[delta.index] = delta.finish_reason

    request.set_listener(read)
    first, *rest = ids(engine, "a d")
    bring(engine, (0, first), (1, first))
    restart(engine)
    assert request.num_resumptions == 1
    (again,) = engine.sent
    assert again.outputs == [[first], [first]]
    for token in rest:
        bring(engine, (2, token))
    for token in ids(engine, "og"):
        bring(engine, (2, token))
    assert (texts[0], reasons[0]) == ("a ", "stop"), "the stop string came over the restart"
    assert engine.sent[-1] == AbortSequences([2])
    restart(engine)
    assert [message.choices for message in engine.sent] == [[1]]
    request.close()
    assert engine.status().num_requests == 0


async def test_a_request_during_a_recovery_waits_and_may_be_aborted(engine):
    restart(engine, is_attached=False)
    (kept,) = await engine.submit([[5]], PARAMS)
    (aborted,) = await engine.submit([[6]], PARAMS, request_id="mine")
    embedding = asyncio.ensure_future(engine.embed([7, 8]))
    await asyncio.sleep(0)
    assert engine.status().stats.waiting == 3
    assert engine.abort("mine") == 1
    (delta,) = aborted.pop_deltas()
    assert delta.finish_reason == "abort"
    engine._client.attach(engine.sent.append)
    assert [message.prompt for message in engine.sent] == [[5], [7, 8]]
    bring(engine, (0, 9), ends=[FinishedSequence(0, "length")])
    (delta,) = kept.pop_deltas()
    assert (delta.token_ids, delta.finish_reason) == ([9], "length")
    embedding.cancel()
    await asyncio.gather(embedding, return_exceptions=True)
    assert engine.sent[-1] == AbortSequences([1])
    for request in (kept, aborted):
        request.close()
    assert engine.status().num_requests == 0


async def test_a_prompt_that_kills_workers_refuses_all_prompts_with_it(engine):
    (request,) = await engine.submit([[6]], PARAMS)
    for _ in range(3):
        (message,) = engine.sent
        engine._client.on_death({message.seq})
        restart(engine)
    (delta,) = request.pop_deltas()
    assert (delta.finish_reason, delta.error_kind) == ("error", "poison")
    with pytest.raises(PoisonRequestError):
        await engine.submit([[5], [6]], PARAMS)
    assert [type(message) for message in engine.sent] == [SubmitRequest, AbortSequences]
    request.close()
    assert engine.status().num_requests == 0
