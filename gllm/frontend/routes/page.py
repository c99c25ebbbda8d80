"""GET / and /page/{path}: the chat page and its files.

Owns their headers. Knows nothing of what the page does: it is one more client of the API.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import ETag, web

from gllm.frontend.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "font-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # Browsers that know of it refuse to make markup of any text.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS = {
    # Kept by the browser, and asked for again each time, which costs a 304: a newer gllm is seen.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(POLICY),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class File:
    """A file as it is sent."""

    body: bytes
    kind: str
    tag: str

    @property
    def charset(self) -> str | None:
        """The encoding of a text file; None for a font."""
        return None if self.kind.startswith("font/") else "utf-8"


async def get_chat_page(request: web.Request) -> web.Response:
    """The chat page."""
    return _answer(request, "index.html")


async def get_chat_page_file(request: web.Request) -> web.Response:
    """A file of the chat page."""
    return _answer(request, request.match_info["path"])


def _answer(request: web.Request, path: str) -> web.Response:
    # A lookup, never a path of the file system: nothing outside the folder can be named.
    if (found := _files().get(path)) is None:
        raise ApiError(404, f"the chat page has no file {path!r}", code="http_404")
    known = request.if_none_match or ()
    same = any(tag.value in (found.tag, "*") for tag in known)
    if same:
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=found.body, content_type=found.kind, charset=found.charset, headers=HEADERS
        )
    response.etag = ETag(found.tag)
    return response


@cache
def _files() -> dict[str, File]:
    """Return the page's files by path relative to their folder, with slashes. Read once."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            name = path.relative_to(FOLDER).as_posix()
            tag = hashlib.sha256(body).hexdigest()[:16]
            found[name] = File(body, TYPES[path.suffix], tag)
    return found
