"""Cross-site requests and DNS rebinding: whose pages may use the server, by which host names."""

import json
import ssl

import aiohttp
import pytest
from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.listening import tls_context
from gllm.frontend.middleware.origin import host_name, make_host_check
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT, CHAT_PATH, serving
from tests.support.http.endpoint_bodies import EXAMPLES
from tests.support.network.certificates import make_certificate

EVIL = "https://evil.example"
FOREIGN = [EVIL, "http://127.0.0.1:1", "http://localhost.evil.example", "null", "", "file://"]
ROUTES = [(method, one.path) for one in ENDPOINTS for method in one.methods] + [
    ("GET", "/nowhere"),
    ("PUT", "/abort"),
]


def origin_of(server, host="127.0.0.1"):
    return f"http://{host}:{server.client.server.port}"


async def ask(server, method, path, headers):
    """Status and error code of a request with a body that the endpoint accepts."""
    names = {"path": "app.js", "model": "fake/model", "name": "a", "room": "1"}
    url = path.format(**names, response_id="resp_1")
    body = json.dumps(EXAMPLES[path]).encode() if path in EXAMPLES else None
    # A form of another site sends text/plain, for which a browser asks nobody before.
    sent = {"Content-Type": "text/plain", **headers}
    async with server.client.request(method, url, data=body, headers=sent) as response:
        text = await response.text()
    code = json.loads(text)["error"]["code"] if response.status >= 400 and text else ""
    return response.status, code


async def test_a_foreign_origin_is_refused_on_every_route(server):
    for method, path in ROUTES:
        status, code = await ask(server, method, path, {"Origin": EVIL})
        assert status == 403, (method, path)
        assert method == "HEAD" or code == "origin_not_allowed", (method, path)
    assert server.engine.calls == []
    assert server.engine.asked == []


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT_PATH), ("GET", "/nowhere")])
async def test_the_own_origin_is_as_good_as_none(server, method, path):
    own, _ = await ask(server, method, path, {"Origin": origin_of(server)})
    none, _ = await ask(server, method, path, {})
    assert own == none
    assert own != 403


async def test_a_rebound_host_is_refused_on_every_route(server):
    port = server.client.server.port
    # To the browser, a page of a rebound name is of the same origin as the server.
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    for method, path in ROUTES:
        for more in ({}, {"Sec-Fetch-Site": "same-origin"}):
            status, code = await ask(server, method, path, {**rebound, **more})
            assert status == 403, (method, path)
            assert method == "HEAD" or code == "host_not_allowed", (method, path)
    assert server.engine.calls == []
    assert server.engine.asked == []


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", ["/abort", CHAT_PATH])
async def test_origins_that_are_not_the_server(server, origin, path):
    answer = await server.post(path, EXAMPLES[path], headers={"Origin": origin})
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert "--allowed-origins" in answer.error["message"]


async def test_a_foreign_origin_beside_the_own_one(server):
    headers = [("Origin", origin_of(server)), ("Origin", EVIL)]
    async with server.client.post(CHAT_PATH, json=CHAT, headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.0.2"])
async def test_loopback_names_on_any_port(server, host):
    for port in ("", ":1", f":{server.client.server.port}"):
        headers = {"Host": host + port, "Origin": f"http://{host}{port}"}
        assert (await server.post(CHAT_PATH, CHAT, headers=headers)).status == 200


async def test_default_ports_are_the_same_origin(server):
    for origin, host in (
        ("http://localhost", "localhost:80"),
        ("https://[::1]:443", "[::1]"),
    ):
        headers = {"Host": host, "Origin": origin}
        assert (await server.post(CHAT_PATH, CHAT, headers=headers)).status == 200


@pytest.mark.parametrize(("site", "status"), [("same-origin", 200), ("cross-site", 403)])
async def test_a_browser_knows_which_page_asks_behind_a_proxy(server, site, status):
    """The proxy rewrites Host; Sec-Fetch-Site is beyond the reach of pages."""
    headers = {"Origin": "https://llm.example", "Sec-Fetch-Site": site}
    assert (await server.post(CHAT_PATH, CHAT, headers=headers)).status == status
    own = {"Origin": origin_of(server), "Sec-Fetch-Site": "same-site"}
    assert (await server.post(CHAT_PATH, CHAT, headers=own)).status == 403


async def test_a_key_does_not_stand_in_for_an_origin(engine):
    async with serving(engine, api_key=("key",)) as server:
        headers = {"Origin": EVIL, "X-Api-Key": "key"}
        assert (await server.post(CHAT_PATH, CHAT, headers=headers)).status == 403


async def test_origins_that_are_allowed(engine):
    async with serving(engine, allowed_origins=(EVIL,)) as server:
        headers = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}
        assert (await server.post("/abort", EXAMPLES["/abort"], headers=headers)).status == 200
        for origin in ("null", origin_of(server, "other.example")):
            answer = await server.post("/abort", EXAMPLES["/abort"], headers={"Origin": origin})
            assert answer.status == 403
    async with serving(engine, allowed_origins=("*",)) as server:
        for origin in FOREIGN:
            assert (await server.post(CHAT_PATH, CHAT, headers={"Origin": origin})).status == 200
        rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert (await server.post(CHAT_PATH, CHAT, headers=rebound)).status == 403


async def test_hosts_of_a_server_on_the_network(engine):
    async with serving(engine, host="0.0.0.0", allowed_hosts=("llm.example",)) as server:
        for host, status in {
            "llm.example": 200,
            "LLM.example:8000": 200,
            "localhost:8000": 200,
            "10.1.2.3:8000": 200,  # probes; a rebound name is never an address
            "evil.example": 403,
            "llm.example.evil.example": 403,
            "llm.example@evil.example": 403,
            "": 403,
        }.items():
            answer = await server.post(CHAT_PATH, CHAT, headers={"Host": host})
            assert answer.status == status, host
            assert status == 200 or "--allowed-hosts" in answer.error["message"]


@pytest.mark.parametrize(
    ("bound", "allowed", "good", "bad"),
    [
        ("127.0.0.1", (), ["localhost", "::1", "127.0.0.1"], ["x.example", "10.0.0.1"]),
        ("::1", (), ["localhost", "::1"], ["x.example", "fe80::1", "localhost.x.example"]),
        ("localhost", ("x.example",), ["localhost", "x.example"], ["a.x.example"]),
        ("localhost", ("*.x.example",), ["a.x.example", "b.a.x.example"], ["x.example"]),
        ("localhost", ("*",), ["localhost", "x.example"], []),
        ("0.0.0.0", (), ["x.example", "10.0.0.1"], []),
        ("10.0.0.1", ("[FE80::1]", "X.example"), ["fe80::1", "x.example", "10.0.0.1"], ["y"]),
    ],
)  # fmt: skip
def test_which_hosts_are_accepted(bound, allowed, good, bad):
    is_allowed = make_host_check(ServerConfig(host=bound, allowed_hosts=allowed))
    assert [name for name in good if not is_allowed(name)] == []
    assert [name for name in bad if is_allowed(name)] == []


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("LocalHost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("a.example.", "a.example"),
        ("a:b", None),
        ("a:99999", None),
        ("a/b", None),
        ("user@a", None),
        ("[::1", None),
        ("a#b", None),
        ("", None),
    ],
)
def test_names_of_host_headers(header, name):
    assert host_name(header) == name


@pytest.mark.parametrize(
    "value", ["https://a.example", "a.example:80", "a/b", "", "a,b", "a.*.b", "*a", "two words"]
)
def test_hosts_that_cannot_be(value):
    with pytest.raises(ValueError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(value,))


async def test_tls(engine, tmp_path):
    files = make_certificate(tmp_path, "server")
    config = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])
    runner = ConnectionRunner(make_app(engine, config), config)
    await runner.setup()
    trusted = ssl.create_default_context(cafile=files[0])
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls_context(config)).start()
        own = f"https://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            for headers, status in (
                ({"Origin": own}, 200),
                ({"Origin": EVIL}, 403),
                ({"Origin": "null"}, 403),
                ({"Host": "evil.example"}, 403),
            ):
                asked = session.post(own + CHAT_PATH, json=CHAT, ssl=trusted, headers=headers)
                async with asked as response:
                    assert response.status == status
    finally:
        await runner.cleanup()
