"""Limit the number of values in a JSON text before it is decoded.

Decoding costs little per byte of a long string, and much per value, so the size in bytes does not
bound the time.
"""

from collections.abc import Iterator

from gllm.frontend.errors import ApiError
from gllm.options.limits import MAX_JSON_NUMBERS, MAX_JSON_VALUES

SMALL_BODY_BYTES = 2**16
"""Texts up to this size cannot exceed the limits and are not counted."""
CHUNK_BYTES = 2**18
"""Bytes counted at once. Between two chunks other threads can run."""


def check_json_size(body: bytes) -> None:
    """Raise ApiError if a JSON text has more values than any valid request.

    Takes about 10 ns per byte for strings that contain JSON, so call it in a thread.
    """
    if len(body) <= SMALL_BODY_BYTES or _is_surely_small(body):
        return
    num_values = num_commas = 0
    for num_strings, other_text in split_strings(body):
        num_values += num_strings + other_text.count(b"[") + other_text.count(b"{")
        num_commas += other_text.count(b",")
        if num_values > MAX_JSON_VALUES:
            raise _too_many_error(f"{MAX_JSON_VALUES} strings, lists and objects")
        if num_commas > MAX_JSON_NUMBERS:
            raise _too_many_error(f"{MAX_JSON_NUMBERS} commas between values")


def _is_surely_small(body: bytes) -> bool:
    """Return True if quotes, brackets and commas are few even if those in strings count."""
    num_values = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return num_values <= MAX_JSON_VALUES and body.count(b",") <= MAX_JSON_NUMBERS


def split_strings(body: bytes, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield for each chunk of a JSON text the number of strings and the text outside of strings.

    A string counts for the chunk in which it begins.

    Args:
        body: JSON text.
        chunk_bytes: Bytes of a chunk.
    """
    is_in_string = False
    start = 0
    while start < len(body):
        chunk = body[start : start + chunk_bytes]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and start + len(chunk) < len(body):
            chunk = chunk[:-1]  # keep a backslash and the character that it escapes together
        start += len(chunk)
        # Without escaped backslashes and quotes, every quote begins or ends a string.
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield (len(parts) - is_in_string) // 2, b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0


def _too_many_error(limit: str) -> ApiError:
    message = f"The request body has too many values: at most {limit} are allowed."
    return ApiError(400, message, code="body_too_complex")
