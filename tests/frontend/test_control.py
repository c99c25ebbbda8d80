"""Endpoints that tell of the server and steer it."""

import asyncio

import pytest

from gllm import __version__
from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT
from gllm.messages.kv_transfer import KvTransferTotals
from gllm.scheduler.plan import SchedulerStats
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH


async def test_tokens_of_a_text_and_back(server):
    tokenizer = server.engine.tokenizer
    text = "Hello wörld 🎉"
    answer = await server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    ids = tokenizer.encode(text)
    assert answer.json["tokens"] == ids
    assert (answer.json["count"], answer.json["max_model_len"]) == (len(ids), 256)
    assert len(answer.json["token_strs"]) == len(ids)
    back = await server.post("/detokenize", {"tokens": ids})
    assert back.json == {"prompt": text}


async def test_tokens_of_a_chat_are_its_prompt(server):
    messages = [{"role": "user", "content": "Hi"}]
    answer = await server.post("/tokenize", {"messages": messages})
    await server.chat(messages=messages)
    assert answer.json["tokens"] == server.engine.calls[0].prompt
    bare = await server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert len(bare.json["tokens"]) < len(answer.json["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/abort", {}, "request_id"),
        ("/abort", {"request_id": "x", "abort_all": True}, "request_id"),
    ],
)
async def test_what_cannot_be(server, path, body, param):
    answer = await server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("named_by", ["field", "header"])
async def test_abort_by_id(server, named_by):
    server.engine.delay = 0.02
    fields = {"request_id": "mine"} if named_by == "field" else {}
    headers = {"X-Request-Id": "mine"} if named_by == "header" else {}
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, **fields}
    running = asyncio.ensure_future(server.post(CHAT_PATH, body, headers=headers))
    other = asyncio.ensure_future(server.complete())
    async with asyncio.timeout(5):
        while len(server.engine.calls) < 2:
            await asyncio.sleep(0.005)
    assert (await server.post("/abort", {"request_id": "nobody"})).json == {"aborted": 0}
    assert (await server.post("/abort", {"request_id": "mine"})).json == {"aborted": 1}
    answer = await running
    assert [one["finish_reason"] for one in answer.json["choices"]] == ["abort", "abort"]
    assert (await other).json["choices"][0]["finish_reason"] == "stop"


async def test_abort_of_all(server):
    server.engine.delay = 0.02
    running = [asyncio.ensure_future(server.complete()) for _ in range(3)]
    async with asyncio.timeout(5):
        while len(server.engine.calls) < 3:
            await asyncio.sleep(0.005)
    assert (await server.post("/abort", {"abort_all": True})).json == {"aborted": 3}
    for one in running:
        assert (await one).json["choices"][0]["finish_reason"] == "abort"


async def test_reset_of_the_prefix_cache(server):
    assert (await server.post("/reset_prefix_cache", b"")).status == 200
    assert server.engine.asked == ["reset_prefix_cache"]


async def test_profiles(server):
    assert (await server.post("/start_profile", b"")).json["folder"] == "/profiles"
    assert (await server.post("/stop_profile", b"")).status == 200
    assert server.engine.asked == ["start_profile /profiles", "stop_profile"]
    server.engine.profile_error = "no profile is being recorded"
    answer = await server.post("/stop_profile", b"")
    assert (answer.status, answer.error["message"]) == (409, "no profile is being recorded")


async def test_profiles_are_off_by_default(server):
    server.client.server.app[CONTEXT].config = ServerConfig()
    answer = await server.post("/start_profile", b"")
    assert (answer.status, answer.error["code"]) == (501, "profile_off")
    assert "--profile-dir" in answer.error["message"]
    assert server.engine.asked == []


async def test_server_info(server):
    async with server.client.get("/server_info") as response:
        told = await response.json()
    assert told["version"] == __version__
    assert told["model"]["name"] == "fake/model"
    assert told["engine"] == {"state": "ready"}
    assert told["server"]["max_choices"] == 8


async def test_a_router_has_no_single_number_of_ranks(server):
    server.engine.tensor_parallel_size = None
    async with server.client.get("/server_info") as response:
        assert (await response.json())["tp_size"] is None


@pytest.mark.parametrize(
    ("role", "mode", "prefill_queue", "decode_queue"),
    [("mixed", "null", 0, 0), ("prefill", "prefill", 4, 0), ("decode", "decode", 0, 3)],
)
async def test_ranks_and_role_are_those_of_the_engine(
    server, role, mode, prefill_queue, decode_queue
):
    server.engine.role, server.engine.tensor_parallel_size = role, 2
    server.engine.stats = SchedulerStats(waiting=4, fetching=3)
    server.engine.kv_transfers = KvTransferTotals(num_fetched=4, seconds=0.1)
    async with server.client.get("/server_info") as response:
        info = await response.json()
    assert (info["tp_size"], info["disaggregation_mode"]) == (2, mode)
    async with server.client.get("/v1/loads") as response:
        (load,) = (await response.json())["loads"]
    assert load["disagg_mode"] == mode
    assert (load["prefill_queue_reqs"], load["decode_queue_reqs"]) == (prefill_queue, decode_queue)
    assert load["kv_transfer_latency_ms"] == pytest.approx(25.0)


async def test_load(server):
    server.engine.delay = 0.02
    running = asyncio.ensure_future(server.post(TEXT_PATH, {"prompt": "Hi"}))
    async with asyncio.timeout(5):
        while not server.engine.calls:
            await asyncio.sleep(0.005)
    async with server.client.get("/load") as response:
        told = await response.json()
    assert told == {"server_load": 1, "running": 2, "waiting": 1, "kv_usage": 0.25}
    await running
