"""The chat page as the server sends it: types, caching, what it may load."""

import re
from pathlib import Path

import pytest
from yarl import URL

from gllm.frontend.routes.page import PAGE_FOLDER

KINDS = {
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "html": "text/html",
    "woff2": "font/woff2",
}
FILES = sorted(
    path.relative_to(PAGE_FOLDER).as_posix()
    for path in PAGE_FOLDER.rglob("*")
    if path.suffix.removeprefix(".") in KINDS
)
OWN = [name for name in FILES if not name.startswith("vendor/")]
"""Each kind of the vendored files once: they are many."""
VENDORED = list({name.rpartition(".")[2]: name for name in FILES if name not in OWN}.values())


@pytest.mark.parametrize("kind", KINDS)
async def test_files_are_sent_whole_and_once(server, kind):
    names = [name for name in OWN + VENDORED if name.endswith(f".{kind}")]
    assert names
    for path in [*(f"/page/{name}" for name in names), *(["/"] if kind == "html" else [])]:
        await check_file(server, path)


async def check_file(server, path):
    """Check that a file is sent with its type, and not again to who has it."""
    name = path.removeprefix("/page/").strip("/") or "index.html"
    async with server.client.get(path) as response:
        body, tag = await response.read(), response.headers["ETag"]
        assert response.status == 200
        assert body == (PAGE_FOLDER / name).read_bytes()
        assert response.content_type == KINDS[name.rpartition(".")[2]]
        assert response.charset == (None if name.endswith(".woff2") else "utf-8")
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


@pytest.mark.parametrize(
    "name",
    [
        "other.js",
        "../app.py",
        "%2e%2e%2fapp.py",
        "",
        ".",
        "vendor",
        "vendor/",
        "vendor/README.md",
        "vendor/katex/LICENSE",
        "vendor/../app.js",
        "vendor/katex/..%2f..%2f..%2f..%2fapp.py",
        "vendor//katex/katex.min.js",
        "%2fetc%2fpasswd",
    ],
)
async def test_nothing_else_is_sent(server, name):
    # Encoded already: the client must not tidy the path before the server sees it.
    url = URL(f"{server.client.make_url('/')}page/{name}", encoded=True)
    async with server.client.session.get(url) as response:
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
    page = (PAGE_FOLDER / "index.html").read_text()
    assert not re.search(r"\s(on\w+|style)\s*=", page)
    assert not re.search(r"<(script|style)(?![^>]*\ssrc=)[^>]*>", page)
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {name.removeprefix("page/") for name in linked} <= set(FILES)
    for path in PAGE_FOLDER.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert set(re.findall(r'(?: from |import\()"\./([^"]+)"', text)) <= set(FILES)
        assert not re.search(
            r"""["'`](/|https?://[^"'`]*["'`])""", text.replace("http://www.w3.org/2000/svg", "")
        )


def test_vendored_libraries_are_named_with_their_licences():
    folder = PAGE_FOLDER / "vendor"
    readme = (folder / "README.md").read_text()
    for library in filter(Path.is_dir, folder.iterdir()):
        assert f"`{library.name}/`" in readme
        assert (library / "LICENSE").read_text().strip()
    versions = {
        "markdown-it": r"markdown-it (\S+) https",
        "katex": r'version="(\d+\.\d+\.\d+)"|version:"(\d+\.\d+\.\d+)"',
        "highlight": r"Highlight\.js v(\S+) ",
    }
    for name, pattern in versions.items():
        [script, *_] = sorted((folder / name).glob("*.*js"))
        match = re.search(pattern, script.read_text())
        assert match, script
        [version] = filter(None, match.groups())
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}/`"))
        assert f"| {version} |" in row


def test_languages_that_the_page_names_are_vendored():
    text = (PAGE_FOLDER / "code.js").read_text()
    [table] = re.findall(r"const ALIASES = \{(.*?)\n\};", text, re.S)
    named = set(re.findall(r"^  (\w+): \[", table, re.M))
    folder = PAGE_FOLDER / "vendor" / "highlight" / "languages"
    assert named == {path.name.removesuffix(".min.js") for path in folder.iterdir()}


def test_styles_load_fonts_of_this_server_alone():
    for path in PAGE_FOLDER.rglob("*.css"):
        text = path.read_text()
        assert not re.search(r"@import|https?:|url\(\s*[\"']?(?:/|data:)", text), path
        for name in re.findall(r"url\(([^)]+\.woff2)\)", text):
            assert (path.parent / name).is_file()


def test_the_page_stays_small():
    """What a browser may have to load, fonts and all languages included."""
    assert sum((PAGE_FOLDER / name).stat().st_size for name in FILES) < 1_000_000
