"""The chat markup of the demo model: its special tokens and its template.

Owns both forms of the same thing, the Jinja template that is shipped with the model and the
function that renders training text; a test holds them together. It knows nothing of the contents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


def render(messages: Sequence[Message]) -> str:
    """A finished conversation as the model sees it."""
    return "".join(
        f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n" for message in messages
    )


def render_prompt(messages: Sequence[Message]) -> str:
    """A conversation that waits for the assistant's answer."""
    return f"{render(messages)}{TURN_START}assistant\n"
