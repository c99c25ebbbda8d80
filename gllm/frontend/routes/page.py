"""GET / and GET /page/{path}: the chat page and its files."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import ETag, web

from gllm.frontend.errors import ApiError

PAGE_FOLDER = Path(__file__).parents[1] / "page"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Media types by file suffix. Other files are not served."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "font-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # Browsers with Trusted Types refuse to parse text as markup.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
"""Restricts the page to its own files and this server, without inline scripts and styles."""
RESPONSE_HEADERS = {
    # Browsers revalidate cached files each time (304), so that an upgrade of gllm takes effect.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(CONTENT_SECURITY_POLICY),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the built-in chat page, held in memory."""

    body: bytes
    content_type: str
    etag: str
    """Hash of the body."""

    @property
    def charset(self) -> str | None:
        """Encoding of a text file; None for a font."""
        return None if self.content_type.startswith("font/") else "utf-8"


async def get_chat_page(request: web.Request) -> web.Response:
    """Return the built-in chat page."""
    return _send_file(request, "index.html")


async def get_chat_page_file(request: web.Request) -> web.Response:
    """Return a script, style sheet or font of the built-in chat page."""
    return _send_file(request, request.match_info["path"])


def _send_file(request: web.Request, path: str) -> web.Response:
    """Return the response with a file, or 304 if the client has it. Raises ApiError."""
    # The path is looked up among the loaded files: files outside of the folder are unreachable.
    page_file = _load_files().get(path)
    if page_file is None:
        raise ApiError(404, f"The chat page has no file {path!r}.", code="http_404")
    client_tags = request.if_none_match or ()
    if any(tag.value in (page_file.etag, "*") for tag in client_tags):
        response = web.Response(status=304, headers=RESPONSE_HEADERS)
    else:
        response = web.Response(
            body=page_file.body,
            content_type=page_file.content_type,
            charset=page_file.charset,
            headers=RESPONSE_HEADERS,
        )
    response.etag = ETag(page_file.etag)
    return response


@cache
def _load_files() -> dict[str, PageFile]:
    """Return the page's files by path relative to their folder, with slashes. Loaded once."""
    files = {}
    for path in sorted(PAGE_FOLDER.rglob("*")):
        if path.suffix in CONTENT_TYPES:
            body = path.read_bytes()
            name = path.relative_to(PAGE_FOLDER).as_posix()
            etag = hashlib.sha256(body).hexdigest()[:16]
            files[name] = PageFile(body, CONTENT_TYPES[path.suffix], etag)
    return files
