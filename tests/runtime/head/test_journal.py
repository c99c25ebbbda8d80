"""Journal entries of requests that another process continues."""

from typing import Any

import msgspec
import pytest

from gllm.config.sampling import MAX_N
from gllm.messages.handoff import KvSource
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.journal import JournalEntry

SOURCE = KvSource("one", 3, 2**62, 4, b"endpoint")
PARAMS = SequenceSamplingParams(seed=5, logprobs=1)


def submission(**fields: Any) -> SubmitRequest:
    return SubmitRequest(7, [1, 2, 3], PARAMS, 9, [0], priority=2, cache_salt="salt", **fields)


@pytest.mark.parametrize(
    "message",
    [
        submission(),
        submission(n=3),
        submission(n=2, outputs=[[4, 5], []]),
        submission(n=2, choices=[1, 3], outputs=[[4], [6]], age_seconds=2.5),
        submission(n=1, choices=[2**31 - 1]),
        submission(kv_ticket=2**63 - 1, predicted_output_tokens=7),
        submission(kv_ticket=5, is_ticket_foreign=True),
        submission(session="agent", client="key 1"),
        submission(outputs=[[4]], kv_source=SOURCE),
    ],
)
def test_a_submission_can_be_submitted_again_as_it_was(message: SubmitRequest) -> None:
    entry = JournalEntry.from_submission(message, arrival=100.0 - message.age_seconds)
    assert entry.submission(7, 100.0) == message
    assert len(entry.outputs) == len(entry.alive) == message.n


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"n": 2, "choices": [1]}, "2 different indices"),
        ({"n": 2, "choices": [1, 1]}, "2 different indices"),
        ({"n": 2, "choices": [3, 1]}, "ascending"),
        ({"n": 2, "outputs": [[4]]}, "2 lists"),
        ({"n": MAX_N + 1}, "at most"),
        ({"n": 2**60}, "at most"),
        ({"age_seconds": float("nan")}, "age_seconds"),
        ({"n": 2, "kv_ticket": 5}, "one choice"),
        ({"n": 2, "outputs": [[4], []], "kv_source": SOURCE}, "4 tokens, but the request only 3"),
    ],
)
def test_a_submission_that_contradicts_itself_is_refused(
    fields: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ValueError, match=cause):
        JournalEntry.from_submission(submission(**fields), 0.0)


def test_a_source_is_used_once_and_a_ticket_each_time() -> None:
    message = submission(outputs=[[4]], kv_ticket=5, kv_source=SOURCE)
    entry = JournalEntry.from_submission(message, arrival=0.0)
    entry.on_submitted(7)
    again = entry.submission(8, 0.0)
    assert (again.kv_ticket, again.kv_source) == (5, None)


def test_an_engine_continues_what_another_process_submitted() -> None:
    client, sent = EngineClient(), list[Any]()
    client.attach(sent.append)
    message = submission(n=2, choices=[1, 3], outputs=[[4], [6]])
    entry = JournalEntry.from_submission(message, arrival=0.0)
    stream = client.submit_entry(entry, "id")
    expected = msgspec.structs.replace(message, seq=0, request_id="id")
    assert msgspec.structs.replace(sent[0], age_seconds=0.0) == expected
    assert stream.alive == {1, 3}
    assert client.num_requests == 1
    client.release(stream)
    assert client.num_requests == 0
