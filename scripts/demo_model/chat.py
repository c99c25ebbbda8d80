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
    "{%- set has_tools = tools is defined and tools %}"
    "{%- if has_tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}"
    "{{- 'Tools:\\n' }}"
    "{%- for tool in tools %}{{- tool['function'] | tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- 'To call one, answer:\\n<tool_call>\\n"
    '{"name": NAME, "arguments": {..}}'
    "\\n</tool_call><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (has_tools and loop.first and message['role'] == 'system') %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] %}{{- message['content'] }}{%- endif %}"
    "{%- endif %}"
    "{%- if message['tool_calls'] is defined and message['tool_calls'] %}"
    "{%- for call in message['tool_calls'] %}"
    "{%- if message['content'] or not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{- call['function']['arguments'] | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML, with tools as the Hermes family writes them. A chat without tools and without tool calls
renders as the texts the model was trained on. It has only what other template engines read too
(llama.cpp's, minijinja): no tuples, no methods of Python, no slices with steps."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


def render(messages: Sequence[Message]) -> str:
    """Return a finished conversation as the model sees it."""
    return "".join(
        f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n" for message in messages
    )


def render_prompt(messages: Sequence[Message]) -> str:
    """Return a conversation that waits for the assistant's answer."""
    return f"{render(messages)}{TURN_START}assistant\n"
