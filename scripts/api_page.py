"""Writes docs/api.md from the registry of endpoints: `python -m scripts.api_page`.

Owns the page's own words. Knows nothing of endpoints and fields.
"""

from pathlib import Path

from gllm.frontend.app import ENDPOINTS
from gllm.frontend.describe import page

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
INTRODUCTION = """\
# The HTTP API

Written by `python -m scripts.api_page` from the code; `GET /openapi.json` says it to programs.

Every error of every endpoint is `{"error": {"message", "type", "param", "code"}}`; a field that is
not as it has to be is 400 with its name in `param`. Null means unset. A field that is not known is
ignored, with one warning in the log; one that is known and not done here is refused by name, but
for the values its row shows, which ask for nothing.

"""


def text() -> str:
    """The whole page."""
    return INTRODUCTION + page(ENDPOINTS)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
