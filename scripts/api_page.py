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
TRANSLATIONS = """
## How other APIs are served

`/v1/responses` and `/v1/messages` ask chat completions, and answer in their own shape. An error
names the field as the client knows it. Where there is no counterpart:

- Nothing is kept. `store` has no effect, answers say `"store": false`, and what names a stored
  answer, conversation or template is refused.
- `instructions`, `system`, and system and developer messages at the beginning become one system
  message: chat templates have no place for more. In `/v1/messages`, a user's messages in a row
  become one.
- Reasoning is told whole: as `reasoning_text`, or as a `thinking` block with an empty signature.
  Given back, it reaches the chat template as `reasoning_content`. Summaries and encrypted contents
  are neither made nor read, and no budget of reasoning is kept.
- Tools are functions that the client runs; every other type is refused, as are images and files.
  What else items, parts, blocks and tools hold (`status`, `cache_control`, `is_error`, `strict`)
  has no effect.
- A stream cannot take back a call that turns out to be none: its item ends as `incomplete`, its
  block without a whole object. An answer that is not streamed leaves it out, but for its text.
- Messages that end with the assistant's are gone on with; input that ends so is answered anew.
- Every token of the prompt that is not read from the prefix cache counts as plain input: none is
  told as written to it. In `/v1/messages`, `input_tokens` are those without the cached ones.
- An answer that `/abort` ends is `incomplete` with the reason `abort`; of `/v1/messages`, that is
  the `stop_reason`.
- Errors of `/v1/messages` have `"type": "error"` beside `error`.
"""


def text() -> str:
    """The whole page."""
    return INTRODUCTION + page(ENDPOINTS) + TRANSLATIONS


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
