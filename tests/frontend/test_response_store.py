"""Responses are stored within bounds, for their client alone, and continued by their id."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.frontend.fields.responses import CompactFields, InputTokensFields, ResponsesFields
from gllm.frontend.response_store import (
    ITEM_BYTES,
    TURN_BYTES,
    NotStoredError,
    ResponseStore,
    StoredResponse,
)
from tests.frontend.conftest import Server, serving
from tests.frontend.test_responses import PATH, prompt_of, respond, stream
from tests.support.examples import num_examples


def stored(name: str, size: int = 0) -> StoredResponse:
    """Return a turn of two items with the ids `in NAME` and `out NAME`."""
    item = {"id": f"in {name}", "text": "x" * size}
    response = {"id": name, "output": [{"id": f"out {name}"}], "tools": []}
    return StoredResponse(json.dumps(response).encode(), json.dumps([item]).encode())


UNIT_BYTES = len(b"".join(stored("0"))) + TURN_BYTES + 2 * ITEM_BYTES
"""Bytes of a turn whose name has one character."""


def add(store: ResponseStore, owner: str, name: str, previous: str | None, now: float) -> bool:
    return store.add(owner, name, stored(name), (f"in {name}", f"out {name}"), previous, now)


def names(store: ResponseStore, owner: str, name: str, now: float) -> list[str]:
    return [item["id"] for item in store.get_conversation(owner, name, now)]


def test_a_conversation_is_that_of_its_turns():
    store = ResponseStore(10**6, 10)
    assert add(store, "me", "a", None, 0)
    assert add(store, "me", "b", "a", 1)
    assert add(store, "me", "c", "a", 2)
    assert names(store, "me", "b", 3) == ["in a", "out a", "in b", "out b"]
    assert names(store, "me", "c", 3) == ["in a", "out a", "in c", "out c"]
    assert store.get_items("me", ("out a", "none"), 3) == {"out a": {"id": "out a"}}
    assert store.get_items("other", ("out a",), 3) == {}
    for call in (store.get_conversation, store.get):
        with pytest.raises(NotStoredError):
            call("other", "a", 3)
    assert not add(store, "other", "d", "a", 3)
    # What is continued stays, although it has no name any more.
    store.remove("me", "a", 3)
    with pytest.raises(NotStoredError):
        store.get("me", "a", 3)
    assert names(store, "me", "b", 3) == ["in a", "out a", "in b", "out b"]
    store.remove("me", "b", 3)
    store.remove("me", "c", 3)
    assert store.num_bytes == 0


def test_a_response_ends_after_its_last_use():
    store = ResponseStore(10**6, 10)
    add(store, "me", "a", None, 0)
    add(store, "me", "b", None, 5)
    assert store.get("me", "a", 9)
    with pytest.raises(NotStoredError):
        store.get("me", "b", 15)
    assert store.get("me", "a", 18)
    assert store.get_items("me", ("out a",), 28) == {}
    assert store.num_bytes == 0


def test_a_client_with_much_loses_its_own():
    size = UNIT_BYTES + 4
    store = ResponseStore(10 * size, 100)
    add(store, "small", "s0", None, 0)
    for number in range(50):
        assert add(store, "large", f"l{number % 10}{number // 10}", None, number / 10)
    assert store.get("small", "s0", 6)
    assert store.num_bytes <= 10 * size
    assert not store.add("large", "huge", stored("huge", 10 * size), (), None, 6)
    ids = [f"i{number}" for number in range(10 * size // ITEM_BYTES)]
    assert not store.add("large", "ids", stored("ids"), ids, None, 6)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "continue", "remove", "get"]),
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.integers(0, 5),
            st.integers(0, 4),
        ),
        max_size=60,
    ),
    st.integers(0, 8),
)
@settings(max_examples=num_examples(60, 3000))
def test_bounds_and_chains(actions, size):
    """Beside a model that only remembers what each conversation has to be."""
    store, now = ResponseStore(size * UNIT_BYTES, 12), 0
    expected: dict[tuple[str, str], list[str]] = {}
    for action, owner, name, other, seconds in actions:
        now += seconds
        key = (owner, str(name))
        if action in ("add", "continue"):
            previous = str(other) if action == "continue" else None
            base = expected.get((owner, str(other)), []) if previous else []
            if add(store, owner, str(name), previous, now):
                expected[key] = [*base, f"in {name}", f"out {name}"]
        else:
            try:
                assert names(store, owner, str(name), now) == expected[key]
                if action == "remove":
                    store.remove(owner, str(name), now)
            except NotStoredError:
                continue
        assert store.num_bytes <= size * UNIT_BYTES
    for owner in "ab":
        with pytest.raises(NotStoredError):
            store.get(owner, "0", now + 12)
    assert store.num_bytes == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_is_continued_by_its_id(server, streams):
    async def ask(**fields: Any) -> Any:
        if streams:
            return (await stream(server, **fields))[-1]["response"]
        return (await respond(server, **fields)).json

    first = await ask(input="One", instructions="Be brief")
    assert first["store"] is True
    second = await ask(input="Two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = prompt_of(server)
    assert "Be brief" not in prompt
    parts = ["One", server.engine.reply, "Two"]
    assert sorted(parts, key=prompt.index) == parts
    # The default of the ai SDK: the whole conversation, with references to what it has received.
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    user = [{"role": "user", "content": text} for text in ("One", "Two")]
    await ask(input=[user[0], reference, user[1]])
    assert prompt_of(server) == prompt
    fields = {"input": "Two", "previous_response_id": first["id"]}
    counted = await server.post(f"{PATH}/input_tokens", fields)
    assert counted.json["input_tokens"] == len(server.engine.calls[-1].prompt)
    assert (await server.post(f"{PATH}/compact", fields)).status == 200


@pytest.mark.parametrize("schema", [ResponsesFields, InputTokensFields, CompactFields])
def test_stored_items_are_read_in_a_thread(schema):
    user = {"role": "user", "content": "Hi", "id": "u"}
    for reference in ({"type": "item_reference", "id": "x"}, {"id": "x"}):
        assert schema(input=[user, reference]).refers_to_stored
    assert schema(input="Hi", previous_response_id="x").refers_to_stored
    assert not schema(input="Hi").refers_to_stored
    assert not schema(input=[user]).refers_to_stored


async def test_what_is_not_stored_is_named(server):
    unstored = (await respond(server, store=False)).json
    assert unstored["store"] is False
    for name in (unstored["id"], "resp_none"):
        answer = await respond(server, previous_response_id=name)
        assert (answer.status, answer.error["param"]) == (400, "previous_response_id")
        assert answer.error["code"] == "previous_response_not_found"
        assert "--response-store-size" in answer.error["message"]
    answer = await respond(server, input=[{"type": "item_reference", "id": "x"}])
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert answer.error["message"].startswith("input[0] has the id 'x', which is not stored")
    answer = await respond(server, input=[{"type": "item_reference", "id": "x"}] * 2)
    assert answer.error["message"] == "input[1] refers to 'x' a second time"


async def test_a_stored_response_is_read_and_deleted(server):
    sent = (await respond(server, input=[{"role": "user", "content": "Hi", "id": "u"}])).json
    path = f"{PATH}/{sent['id']}"
    async with server.client.get(path) as response:
        assert await response.json() == sent
    async with server.client.get(f"{path}/input_items") as response:
        items = await response.json()
    assert (items["data"], items["last_id"]) == (
        [{"role": "user", "content": "Hi", "id": "u"}],
        "u",
    )
    for status in (200, 404):
        async with server.client.delete(path) as response:
            assert response.status == status
    async with server.client.get(path) as response:
        assert (await response.json())["error"]["code"] == "response_not_found"


async def test_nothing_is_stored_without_memory(engine):
    async with serving(engine, response_store_size=0) as server:
        sent = (await respond(server)).json
        assert sent["store"] is False
        answer = await respond(server, previous_response_id=sent["id"])
        assert answer.status == 400


async def test_each_key_has_its_own_responses(engine):
    async with serving(engine, api_key=("one", "two")) as server:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        sent = (await server.post(PATH, {"input": "Hi"}, headers=keys[0])).json
        fields = {"input": "Hi", "previous_response_id": sent["id"]}
        statuses = [(await server.post(PATH, fields, headers=key)).status for key in keys]
        assert statuses == [200, 400]
        async with server.client.get(f"{PATH}/{sent['id']}", headers=keys[1]) as response:
            assert response.status == 404


@pytest.fixture
async def ai(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(server.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_the_client_of_openai(server, ai):
    first = await ai.responses.create(model="fake/model", input="One")
    second = await ai.responses.create(
        model="fake/model", input="Two", previous_response_id=first.id
    )
    assert (await ai.responses.retrieve(second.id)).output_text == server.engine.reply
    items = await ai.responses.input_items.list(second.id)
    assert len(items.data) == 1
    await ai.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(second.id)
