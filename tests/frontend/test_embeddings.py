"""POST /v1/embeddings."""

import array
import base64
import json
import math

import openai
import pytest

from gllm.engine.interface import EmbeddingError

PATH = "/v1/embeddings"


async def test_one_text(server):
    answer = await server.post(PATH, {"input": "Hi", "model": "fake/model"})
    ids = server.engine.tokenizer.encode("Hi")
    length = math.hypot(ids[0], 3, 4, 12)
    assert answer.status == 200
    assert answer.json["object"] == "list"
    (entry,) = answer.json["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    wanted = [number / length for number in (ids[0], 3, 4, 0, 0, 0, 0, 12)]
    assert entry["embedding"] == pytest.approx(wanted)
    assert answer.json["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


@pytest.mark.parametrize("given", [["a", "b", "c"], [[7, 8], [9], [7]], [7, 8, 9]])
async def test_several_in_their_order(server, given):
    answer = await server.post(PATH, {"input": given})
    count = 1 if isinstance(given[0], int) else len(given)
    assert [entry["index"] for entry in answer.json["data"]] == list(range(count))
    assert all(math.hypot(*entry["embedding"]) == pytest.approx(1) for entry in answer.json["data"])


async def test_dimensions_are_cut_and_scaled(server):
    answer = await server.post(PATH, {"input": [0], "dimensions": 3})
    assert answer.json["data"][0]["embedding"] == pytest.approx([0, 0.6, 0.8])
    refused = await server.post(PATH, {"input": [0], "dimensions": 9})
    assert (refused.status, refused.error["param"]) == (400, "dimensions")


async def test_base64(server):
    plain = (await server.post(PATH, {"input": "Hi"})).json["data"][0]["embedding"]
    coded = (await server.post(PATH, {"input": "Hi", "encoding_format": "base64"})).json
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert array.array("f", raw).tolist() == pytest.approx(plain)


async def test_the_openai_client(server):
    url = str(server.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        made = await client.embeddings.create(model="fake/model", input=["Hi", "Hello"])
    assert [len(entry.embedding) for entry in made.data] == [8, 8]


@pytest.mark.parametrize(
    "value", [None, "", [], [[]], {}, 7, [1.5], [-1], [100_000], ["x"] * 65, "long " * 400]
)
async def test_bad_inputs_are_named(server, value):
    answer = await server.post(PATH, json.dumps({"input": value}).encode())
    assert (answer.status, answer.error["param"]) == (400, "input")


async def test_a_failure_is_told(server):
    server.engine.raises = EmbeddingError("logits are not finite")
    answer = await server.post(PATH, {"input": ["a", "b"]})
    assert (answer.status, answer.error["code"]) == (500, "embedding_failed")
    await server.idle()
