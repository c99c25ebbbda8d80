"""Text in place of the content of a chat that is not text.

Results of tools and earlier messages may hold images, files and the like: agents send them again
with every request, so a refusal would end their session. A text says what the model does not see.
"""

from collections.abc import Sequence
from typing import Any

from gllm.options.field_types import FieldError

NOT_SHOWN = "not shown: this model reads text only"
_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
}
"""Name of the media by `type` of a content part, in OpenAI's and Anthropic's APIs."""
_MAX_NAME_CHARACTERS = 200
"""Maximum characters of a file's name in a placeholder."""


class MediaPartError(FieldError):
    """Error: a content part has an image, a file, audio or video, which no served model reads."""


def is_media_part(part: object) -> bool:
    """Return True for a content part with an image, a file, audio or video."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _KINDS


def find_question(messages: Sequence[object]) -> int:
    """Return the index of the last message of the user, whose media are new; -1 if there is none.

    Args:
        messages: Messages or items, which may be invalid.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, dict) and message.get("role") == "user":
            return index
    return -1


def describe_part(part: dict[str, Any]) -> str:
    """Return the text of a content part, or a placeholder that says what it is."""
    kind = part.get("type")
    match kind:
        case "search_result":
            lines = [part.get("title"), part.get("source"), _nested_text(part.get("content"))]
            return "\n".join(line for line in lines if isinstance(line, str) and line)
        case "tool_reference":
            return f"[tool: {_short(part.get('tool_name')) or 'unnamed'}]"
        case "document" if text := _document_text(part):
            return text
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    label = _KINDS.get(kind, "") if isinstance(kind, str) else ""
    label = label or _short(kind) or "content"
    name = _short(part.get("title") or part.get("filename") or part.get("file_id"))
    return f"[{label}{name and ' ' + name}: {NOT_SHOWN}]"


def describe_parts(content: object) -> str | None:
    """Return the text of a tool result, a line per part, with placeholders for what is not text.

    Returns None if the content is neither a string nor a list of objects; an absent content is an
    empty text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    return "\n".join(map(describe_part, content))


def _document_text(part: dict[str, Any]) -> str:
    """Return the text of a document that is sent as text; empty for other documents."""
    source = part.get("source")
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    return _nested_text(source.get("content")) if source.get("type") == "content" else ""


def _nested_text(content: object) -> str:
    """Return the text parts of a nested content."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _short(name: object) -> str:
    """Return a name on one line, shortened; empty if it is not a string."""
    return " ".join(name.split())[:_MAX_NAME_CHARACTERS] if isinstance(name, str) else ""
