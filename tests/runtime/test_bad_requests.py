"""Requests that the workers cannot read or use: each ends alone, with an error that says why."""

import asyncio
from copy import copy
from typing import Any

import msgspec
import numpy as np
import pytest

from gllm.config.sampling import SamplingParams
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_worker, encode
from gllm.messages.requests import EngineOutputs, RejectedRequest, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.options.field_types import FieldError
from gllm.runtime.driver.driver import Driver
from gllm.runtime.head.request_stream import RequestStream
from gllm.runtime.head.supervisor import Supervisor
from gllm.runtime.worker import executor as executor_module
from gllm.runtime.worker.sampling import create_sampling_states
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import FinishedSequence
from gllm.scheduler.scheduler import Scheduler
from tests.support.engines.local_workers import local_engine, local_supervisor

GREEDY = SequenceSamplingParams(temperature=0.0)
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "float seed": ({"sampling": SequenceSamplingParams(seed=3.0)}, "sampling.seed"),  # type: ignore[arg-type]
    "seed beyond 64 bits": ({"sampling": SequenceSamplingParams(seed=2**63)}, "sampling.seed"),
    "text for top_k": ({"sampling": SequenceSamplingParams(top_k="x")}, "sampling.top_k"),  # type: ignore[arg-type]
    "bias of text": ({"sampling": SequenceSamplingParams(logit_bias={3: "x"})}, "logit_bias"),  # type: ignore[dict-item]
    "allowed beyond 64 bits": ({"sampling": SequenceSamplingParams(allowed=(2**63,))}, "allowed"),
    "logprobs of bool": ({"sampling": SequenceSamplingParams(logprobs=True)}, "sampling.logprobs"),
    "float tokens": ({"prompt": [3.0, 4.0]}, "prompt"),
    "bool tokens": ({"prompt": [4, True]}, "prompt"),
    "negative token": ({"prompt": [4, -1]}, "prompt"),
    "float max_tokens": ({"max_tokens": 3.0}, "max_tokens"),
    "float stop id": ({"stop_ids": [7.0]}, "stop_ids"),
    "float priority": ({"priority": 1.5}, "priority"),
    "salt of bytes": ({"cache_salt": b"\xff"}, "cache_salt"),
}
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "token out of the vocabulary": ({"prompt": [4, 10**6]}, "prompt"),
    "bias out of the vocabulary": (
        {"sampling": SequenceSamplingParams(logit_bias={10**6: 1.0})},
        "logit_bias",
    ),
    "allowed out of the vocabulary": (
        {"sampling": SequenceSamplingParams(allowed=(10**6,))},
        "allowed",
    ),
    "word out of the vocabulary": (
        {"sampling": SequenceSamplingParams(bad_words=((10**6,),))},
        "bad_words",
    ),
    "no prompt": ({"prompt": []}, "prompt"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "too long": ({"max_tokens": 10**6}, "max_tokens"),
}


def unchecked(params: SamplingParams, **fields: Any) -> SamplingParams:
    """Parameters that have not been checked, as of another type."""
    changed = copy(params)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


async def end_of(stream: RequestStream) -> FinishedSequence:
    """How a request's first choice ends."""
    end = None
    while end is None:
        await asyncio.wait_for(stream.wait(), 60)
        pieces = stream.pop_deltas()
        end = pieces[0].end if 0 in pieces else None
    return end


def submit(supervisor: Supervisor, **fields: Any) -> RequestStream:
    """Send a request as the engine does, without its checks."""
    request: dict[str, Any] = {
        "prompt": [5, 6],
        "sampling": GREEDY,
        "max_tokens": 40,
        "stop_ids": [],
    } | fields
    return supervisor.client.submit(**request)


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_request_that_cannot_be_read_ends_alone(stages: int) -> None:
    async with local_supervisor(stages) as (supervisor, _):
        neighbour = submit(supervisor)
        cases = UNREADABLE | UNUSABLE
        bad = {name: submit(supervisor, **fields) for name, (fields, _) in cases.items()}
        several = submit(supervisor, sampling=SequenceSamplingParams(seed=3.0), n=3)  # type: ignore[arg-type]
        for name, (_, field) in cases.items():
            end = await end_of(bad[name])
            assert end.finish_reason == "error", name
            assert field in end.error, name
        assert (await end_of(several)).finish_reason == "error"
        assert not several.alive
        assert (await end_of(neighbour)).finish_reason == "length"
        assert (await end_of(submit(supervisor))).finish_reason == "length"
        for stream in (neighbour, several, *bad.values()):
            supervisor.client.release(stream)
        assert supervisor.state == "ready"


@pytest.mark.parametrize(("stages", "grammar"), [(1, True), (2, False)])
async def test_a_request_that_cannot_be_registered_ends_alone(
    stages: int, grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_a_seed(message: RegisterSequences, *given: Any) -> Any:
        if message.sampling is not None and message.sampling.seed == 13:
            raise RuntimeError("can't start new thread")
        return create_sampling_states(message, *given)

    monkeypatch.setattr(executor_module, "create_sampling_states", fails_for_a_seed)
    text = msgspec.json.encode({"grammars": [{"lark_grammar": "start: /[0-9]+/"}]}).decode()
    bad = SequenceSamplingParams(seed=13, grammar=text if grammar else "")
    async with local_supervisor(stages) as (supervisor, _):
        neighbour = submit(supervisor)
        for max_tokens in (1, 40):
            end = await end_of(submit(supervisor, sampling=bad, n=2, max_tokens=max_tokens))
            assert (end.finish_reason, "can't start new thread" in end.error) == ("error", True)
        assert (await end_of(neighbour)).finish_reason == "length"
        assert supervisor.state == "ready"


async def test_what_cannot_be_sent_is_refused_and_leaves_nothing() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    bad_seed: Any = np.datetime64(0, "s")
    cases: list[tuple[Any, SamplingParams, dict[str, Any]]] = [
        ([[5], [3.0, 4.0]], params, {}),
        ([[5], [True, 4]], params, {}),
        ([[5], "text"], params, {}),
        ([[5], None], params, {}),
        ([[5], [4]], params, {"cache_salt": "\ud800"}),
        ([[5], [4]], params, {"priority": 2**70}),
        ([[5], [4]], unchecked(params, seed=bad_seed), {}),
    ]
    async with local_engine() as (engine, _):
        for prompts, sampling, extra in cases:
            with pytest.raises(FieldError):
                await engine.submit(prompts, sampling, **extra)
            assert engine.status().num_requests == 0
        ids: Any = np.array([5, 6])
        (request,) = await engine.submit([ids], SamplingParams(max_tokens=2))
        await asyncio.wait_for(request.wait(), 60)
        request.close()


async def test_a_reader_that_fails_holds_up_no_other() -> None:
    async with local_supervisor() as (supervisor, _):
        bad, good = submit(supervisor), submit(supervisor)

        def fail() -> None:
            raise UnicodeError("no text")

        bad.set_listener(fail)
        assert (await end_of(good)).finish_reason == "length"
        assert not bad.alive
        assert supervisor.state == "ready"


def test_an_error_names_the_field() -> None:
    sampling = SequenceSamplingParams(bad_words=((3, 4), (5, "x")))  # type: ignore[arg-type]
    message = decode_for_worker(encode(SubmitRequest(7, [1], sampling, 4, [], 2)))
    assert isinstance(message, RejectedRequest)
    assert (message.seq, message.n) == (7, 2)
    assert "sampling.bad_words" in message.error
    assert "Expected `int`, got `str`" in message.error


RESUMED: dict[str, tuple[dict[str, Any], str]] = {
    "one choice of two": ({"choices": [0]}, "choices"),
    "the same choice twice": ({"choices": [3, 3]}, "choices"),
    "a third choice of two": ({"choices": [0, 1, 2]}, "choices"),
    "a negative choice": ({"choices": [0, -1]}, "choices"),
    "a choice of text": ({"choices": [0, "1"]}, "choices"),
    "a choice beyond 31 bits": ({"choices": [0, 2**31]}, "choices"),
    "one output of two": ({"outputs": [[5]]}, "outputs"),
    "an output that is no list": ({"outputs": [[5], 6]}, "outputs"),
    "an output of text": ({"outputs": [[5], ["x"]]}, "outputs"),
    "a negative token": ({"outputs": [[5], [-1]]}, "outputs"),
    "a token out of the vocabulary": ({"outputs": [[5], [6, 32]]}, "outputs"),
    "an output of full length": ({"outputs": [[5], [6, 6, 6, 6]]}, "outputs"),
    "an output with a stop token": ({"outputs": [[5], [6, 9]]}, "outputs"),
    "a negative age": ({"age_seconds": -0.1}, "age_seconds"),
    "an age that is no number": ({"age_seconds": float("nan")}, "age_seconds"),
    "an endless age": ({"age_seconds": float("inf")}, "age_seconds"),
    "an age of text": ({"age_seconds": "1"}, "age_seconds"),
}


class EndedRequests:
    """The frontend of a driver: errors of requests that have ended."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}

    def send(self, message: WireMessage) -> None:
        if isinstance(message, EngineOutputs):
            self.errors |= {end.seq: end.error for end in message.outcome.finished}

    def send_encoded(self, payload: bytes) -> None:
        raise AssertionError("outputs are sent as messages")


@pytest.mark.parametrize(("fields", "field"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_request_that_cannot_be_used_ends_alone(
    fields: dict[str, Any], field: str
) -> None:
    frontend = EndedRequests()
    scheduler = Scheduler(SchedulerConfig().resolve(1, 64, 128))
    driver = Driver(scheduler, lambda message: None, [], frontend, vocab_size=32)
    message = decode_for_worker(encode(SubmitRequest(7, [1], GREEDY, 4, [9], 2, **fields)))
    if isinstance(message, RejectedRequest):
        driver.reject(message)
    elif isinstance(message, SubmitRequest):
        driver.submit(message)
    driver.run_iteration()
    assert frontend.errors.keys() == {7, 8}
    assert all(field in error for error in frontend.errors.values())
    assert not scheduler.stats().unfinished


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"choices": [4, 1], "outputs": [[], [6, 31, 6]], "age_seconds": 2.5},
        {"outputs": [[5], []]},
        {"choices": [0, 2]},
    ],
)
def test_a_resumed_request_arrives_as_it_was_sent(fields: dict[str, Any]) -> None:
    sent = SubmitRequest(7, [1], GREEDY, 4, [9], 2, **fields)
    message = decode_for_worker(encode(sent))
    assert message == sent
    assert isinstance(message, SubmitRequest)
    message.check(vocab_size=32)


def test_what_is_no_request_at_all_is_not_taken_for_one() -> None:
    for fields in (
        ["SubmitRequest"],
        ["SubmitRequest", "seven", [1]],
        ["SubmitRequest", -1, [1]],
        ["Start", "x"],
        5,
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_for_worker(msgspec.msgpack.encode(fields))
