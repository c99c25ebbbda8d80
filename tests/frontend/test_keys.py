"""ApiKeys: who gets in, and that no key gets out."""

import hmac
import re
from functools import partial

import pytest

from gllm.commands.server_command import pop_environment_keys
from gllm.config.server import ServerConfig
from gllm.frontend.middleware.keys import ApiKeys, read_api_keys
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT, CHAT_PATH, serving
from tests.support.http.raw import connected
from tests.support.work import count_calls

KEY, OTHER = "sk-first-key", "sk-second-key"


@pytest.fixture
async def locked(engine):
    async with serving(engine, api_key=(KEY, OTHER)) as made:
        yield made


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {OTHER}"},
        {"X-Api-Key": KEY},
        {"Authorization": "Bearer none", "X-Api-Key": OTHER},
        {"Authorization": "Basic eDp5", "X-Api-Key": KEY},
    ],
    ids=str,
)
async def test_a_key_opens(locked, headers):
    assert (await locked.post(CHAT_PATH, CHAT, headers=headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": "Bearer "},
        {"X-Api-Key": KEY.upper()},
        {"X-Api-Key": ""},
        {"Authorization": f"Bearer {KEY} {KEY}"},
        {"X-Api-Key": "schlüssel"},
    ],
    ids=str,
)
async def test_a_wrong_key_does_not(locked, headers):
    answer = await locked.post(CHAT_PATH, CHAT, headers=headers)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="gllm", error="invalid_token"'
    assert locked.engine.calls == []


@pytest.mark.parametrize("headers", [{}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}])
async def test_no_key(locked, headers):
    answer = await locked.post(CHAT_PATH, CHAT, headers=headers)
    assert (answer.status, answer.error["code"]) == (401, "missing_api_key")
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="gllm"'
    assert "X-Request-Id" in answer.headers


async def test_open_endpoints_are_these_alone(locked):
    opened = set()
    for endpoint in ENDPOINTS:
        path = re.sub(r"{\w+}", "x", endpoint.path)
        async with locked.client.request(endpoint.method, path) as response:
            if response.status != 401:
                opened.add(endpoint.path)
    expected = {"/health", "/health/ready", "/ready", "/metrics", "/", "/page/{path}"}
    expected |= {"/kv_handoffs/{room}"}  # has a proof of its own
    assert opened == expected == {one.path for one in ENDPOINTS if one.is_public}


async def test_what_is_not_there_asks_for_a_key_too(locked):
    async with locked.client.get("/nowhere") as response:
        assert response.status == 401
    async with locked.client.get("/nowhere", headers={"X-Api-Key": KEY}) as response:
        assert response.status == 404


async def test_the_body_is_not_waited_for(locked):
    async with connected(locked.client) as raw:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        await raw.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
        status, _, body = await raw.answer()
    assert (status, body["error"]["code"]) == (401, "missing_api_key")


async def test_keys_are_told_to_nobody(locked, caplog):
    config = ServerConfig(api_key=(KEY,))
    assert KEY not in repr(config)
    caplog.set_level("DEBUG")
    headers = {"X-Api-Key": KEY}
    async with locked.client.get("/server_info", headers=headers) as response:
        text = await response.text()
    assert "max_choices" in text
    async with connected(locked.client) as raw:
        await raw.send(f"GET / HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\x00\r\n\r\n".encode())
        status, *_ = await raw.answer()
    assert status == 400
    for key in (KEY, OTHER):
        assert key not in text
        assert key not in caplog.text


async def test_no_keys_no_questions(server):
    assert (await server.chat()).status == 200


def test_every_key_is_compared():
    keys = ApiKeys(["a", "b", "c", "b"])
    assert [keys.index_of(key) for key in "abcd"] == [0, 1, 2, None]
    for key in "abcd":
        counts = count_calls(partial(keys.index_of, key), {"compared": hmac.compare_digest})
        assert counts["compared"] == 3


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  {KEY}  \n# {OTHER}\nb\n")
    keys = read_api_keys(ServerConfig(api_key=("c",), api_key_file=str(file)))
    assert len(keys) == 3
    found = [keys.index_of(key) is not None for key in (KEY, "b", "c", OTHER, "", "# ours")]
    assert found == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (b"fine\ntwo words\n", "line 2"),
        (b"\xff\xfe", "not UTF-8"),
    ],
    ids=str,
)
def test_files_that_cannot_be(tmp_path, text, why):
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=why) as caught:
        read_api_keys(ServerConfig(api_key_file=str(file)))
    assert "--api-key-file" in str(caught.value)
    assert "two words" not in str(caught.value)


def test_keys_of_the_environment():
    environment = {"GLLM_API_KEY": f"{KEY}, {OTHER},", "HOME": "/"}
    assert pop_environment_keys(environment) == [KEY, OTHER]
    assert environment == {"HOME": "/"}
    assert pop_environment_keys(environment) == []
    for wrong in ("", " , ", "two words"):
        with pytest.raises(ValueError, match="GLLM_API_KEY"):
            pop_environment_keys({"GLLM_API_KEY": wrong})
