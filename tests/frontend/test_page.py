"""The chat page as the server sends it: types, caching, what it may load."""

import re

import pytest

from gllm.frontend.routes.page import FOLDER

FILES = sorted(path.name for path in FOLDER.iterdir())
KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
async def test_files_are_sent_whole_and_once(server, path):
    name = path.removeprefix("/page/").strip("/") or "index.html"
    async with server.client.get(path) as response:
        body, tag = await response.read(), response.headers["ETag"]
        assert response.status == 200
        assert body == (FOLDER / name).read_bytes()
        assert response.content_type == KINDS[name.rpartition(".")[2]]
        assert response.headers["Cache-Control"] == "no-cache"
    async with server.client.get(path, headers={"If-None-Match": f'"other", {tag}'}) as response:
        assert (response.status, await response.read()) == (304, b"")
        assert response.headers["ETag"] == tag
    async with server.client.get(path, headers={"If-None-Match": '"other"'}) as response:
        assert response.status == 200
    async with server.client.head(path) as response:
        assert (response.status, await response.read()) == (200, b"")
        assert int(response.headers["Content-Length"]) == len(body)
        assert response.headers["ETag"] == tag


async def test_it_is_there_before_the_model(server):
    server.engine.state = "loading"
    async with server.client.get("/") as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["other.js", "../app.py", "%2e%2e%2fapp.py", "", "."])
async def test_nothing_else_is_sent(server, name):
    async with server.client.get(f"/page/{name}") as response:
        assert response.status in (404, 405)


async def test_the_policy_allows_this_server_alone(server):
    async with server.client.get("/") as response:
        policy = response.headers["Content-Security-Policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources["default-src"] == "'none'"
    allowed = {source for name, source in sources.items() if name.endswith("-src")}
    assert allowed == {"'none'", "'self'"}
    assert sources["require-trusted-types-for"] == "'script'"


def test_the_page_keeps_to_its_policy_and_to_relative_addresses():
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\s(on\w+|style)\s*=", page)
    assert not re.search(r"<(script|style)(?![^>]*\ssrc=)[^>]*>", page)
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {name.removeprefix("page/") for name in linked} <= set(FILES)
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert set(re.findall(r' from "\./([^"]+)"', text)) <= set(FILES)
        assert not re.search(
            r"""["'`](/|https?://[^"'`]*["'`])""", text.replace("http://www.w3.org/2000/svg", "")
        )
