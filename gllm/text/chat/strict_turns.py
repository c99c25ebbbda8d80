"""Rearrange a chat for a template that accepts only some orders of roles.

Such a template has one system message at the start or none, and turns of user and assistant that
alternate. Agents send system messages in the middle, and several messages of the user in a row.
"""

from collections.abc import Iterator

from gllm.text.chat.messages import ChatMessage

SYSTEM_ROLES = ("system", "developer")
_SEPARATOR = "\n\n"
"""Text between the texts of two messages that become one."""


def rearrangements(messages: list[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield alternative forms of a chat, to try in turn if the template rejects the original.

    1. The system messages at the start become one; later ones become part of a user message.
    2. All system messages become part of a user message.
    3. and 4. As 1 and 2; user messages after a tool result also become part of that result.

    Consecutive texts of one role are joined. A form that equals the previous one is skipped. No
    text is lost, and texts stay in order.

    Args:
        messages: The normalized messages; they are not changed.
    """
    num_leading = next(
        (i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    leading = _merged([{**message, "role": "system"} for message in messages[:num_leading]])
    previous = messages
    for into_results in (False, True):
        for kept, rest in ((leading, messages[num_leading:]), ([], messages)):
            form = kept + _merged([_as_user(message) for message in rest], into_results)
            if form != previous:
                yield [dict(message) for message in form]
            previous = form


def _as_user(message: ChatMessage) -> ChatMessage:
    """Return a system message as one of the user, others as they are."""
    return {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message


def _merged(messages: list[ChatMessage], into_results: bool = False) -> list[ChatMessage]:
    """Return messages in which consecutive texts of a role are one.

    Args:
        messages: The messages.
        into_results: Add texts of the user to the result of a tool that they follow.
    """
    texts: list[list[str]] = []
    merged: list[ChatMessage] = []
    for message in messages:
        role, last = message["role"], merged[-1]["role"] if merged else ""
        is_same = role == last != "tool" and _is_text(message) and _is_text(merged[-1])
        if is_same or (into_results and (last, role) == ("tool", "user")):
            texts[-1].append(message["content"])
        else:
            merged.append(message)
            texts.append([message["content"] or ""])
    return [
        {**message, "content": _SEPARATOR.join(parts)} if len(parts) > 1 else message
        for message, parts in zip(merged, texts, strict=True)
    ]


def _is_text(message: ChatMessage) -> bool:
    """Return True for a message without tool calls and reasoning."""
    return not {"tool_calls", "reasoning_content"} & message.keys()
