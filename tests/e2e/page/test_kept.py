"""Conversations that the chat page keeps: rename, export, import, search, delete."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.page_user import GatedEngine, User

TITLES = "[...document.querySelectorAll('#conversations .title')].map((n) => n.firstChild.data)"
EXPORT = """(async () => {
    const { exported } = await import("/page/exchange.js");
    const { conversations } = await import("/page/store.js");
    return exported(conversations()[0]);
})()"""


async def test_conversations_are_kept_renamed_exported_deleted(user: User) -> None:
    for text in ("One", "Two"):
        await user.tab.click("#new-chat")
        await user.say(text)
        await user.answered()
    titles = "[...document.querySelectorAll('#conversations .title')].map((n) => n.innerText)"
    assert await user.tab.evaluate(titles) == ["Two", "One"]
    await user.tab.evaluate(
        "URL.createObjectURL = (blob) => (blob.text().then((text) => (window.file = text)), '#')"
    )
    tool = "#conversations li:first-child .tools button:nth-child({})"
    await user.tab.click("#conversations li:first-child .title")
    await user.tab.click(tool.format(2))
    file = json.loads(await user.tab.until("window.file"))
    assert file["messages"][0]["content"] == "Two"
    assert file["messages"][1]["stats"]["tokens"] > 1
    await user.tab.click(tool.format(1))
    await user.tab.type("Renamed")
    await user.tab.press("Enter")
    await user.tab.until(f"({titles})[0] == 'Renamed'")
    await user.tab.click(tool.format(3))
    await user.tab.until(f"({titles}).length == 1")
    await user.tab.click("#toast-action")
    await user.tab.until(f"({titles})[0] == 'Renamed'")
    assert (await user.messages())[0] == "Two"
    await user.tab.click("#conversations li:last-child .title")
    assert (await user.messages())[0] == "One"


async def import_text(user: User, folder: Path, text: str, name: str = "chat.json") -> None:
    file = folder / name
    file.write_text(text)
    await user.tab.choose("#import-file", file)


@pytest.mark.full
async def test_an_exported_conversation_is_imported(
    user: User, engine: GatedEngine, tmp_path: Path
) -> None:
    """With all its branches, under an id of its own; what is imported can be gone on with."""
    await user.say("First")
    first = await user.answered()
    engine.reply = "Another **answer**"
    await user.tab.click(".again")
    await user.tab.until("document.querySelector('.versions')")
    await user.answered()
    before = await user.messages()
    text = await user.tab.evaluate(EXPORT)
    await user.tab.evaluate("localStorage.clear()")
    await user.visit()
    assert await user.tab.evaluate(TITLES) == []
    for number in (1, 2):
        await import_text(user, tmp_path, text)
        await user.tab.until(f"({TITLES}).length == {number}")
    assert await user.messages() == before == ["First", "Another answer"]
    assert await user.text(".versions span") == "2 / 2"
    assert "tokens" in await user.last(".stats")
    again = await user.tab.evaluate(EXPORT)
    assert json.loads(again) == json.loads(text)
    await user.tab.click(".previous")
    await user.tab.until("document.querySelector('.versions span').innerText == '1 / 2'")
    assert (await user.messages())[1] == first
    await user.say("More")
    assert await user.answered() == "Another answer"
    prompt = engine.tokenizer.decode(engine.calls[-1].prompt)
    assert first in prompt
    assert "**answer**" not in prompt


USER: dict[str, Any] = {"role": "user", "content": "a"}
BROKEN = {
    "it is not JSON": "{",
    "messages has to be a list of messages": json.dumps({"messages": []}),
    "messages[1].role has to be “user” or “assistant”": json.dumps(
        {"messages": [USER, {"role": "system", "content": "x"}]}
    ),
    "messages[0].content has to be a text": json.dumps({"messages": [{"role": "user"}]}),
    "messages[0].stats.tokens has to be a number": json.dumps(
        {"messages": [{"role": "assistant", "content": "", "stats": {"tokens": "<b>"}}]}
    ),
    "messages[0].branches.index has to be a position in tails": json.dumps(
        {"messages": [{**USER, "branches": {"index": 2, "tails": [[USER], None]}}]}
    ),
    "messages[0].branches.tails[0] has to be null": json.dumps(
        {"messages": [{**USER, "branches": {"index": 0, "tails": [[USER], None]}}]}
    ),
    "it is larger than 4 MiB": " " * (4 * 2**20 + 1),
}


@pytest.mark.full
async def test_other_files_are_refused_with_a_reason(user: User, tmp_path: Path) -> None:
    for number, (reason, text) in enumerate(BROKEN.items()):
        await import_text(user, tmp_path, text, f"{number}.json")
        await user.tab.until(
            f"document.querySelector('#toast-text').innerText.includes({reason!r})"
        )
        assert f"{number}.json" in await user.text("#toast-text")
    assert await user.tab.evaluate(TITLES) == []


@pytest.mark.full
async def test_markup_in_an_imported_file_stays_text(user: User, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=hit()>"
    message = {"role": "assistant", "content": hostile, "reasoning": hostile, "extra": hostile}
    messages = [{"role": "user", "content": hostile}, message]
    await import_text(user, tmp_path, json.dumps({"title": hostile, "messages": messages}))
    await user.tab.until(f"({TITLES})[0] == {hostile!r}")
    assert await user.messages() == [hostile, hostile]
    assert await user.count("#thread img, #conversations img") == 0
    assert "extra" not in await user.tab.evaluate("JSON.stringify(localStorage)")


@pytest.mark.full
async def test_search(user: User, tmp_path: Path) -> None:
    """In titles, questions, answers, and branches that are not shown."""
    chats = {
        "Animals": [("Where does the owl live?", "In an old oak."), ("And Otto?", "A fox’s den.")],
        "Plants": [("How old is this Oak?", "Very.")],
        "Numbers": [("One?", "Two.\n\n" * 60), ("Three?", "Four.\n\n" * 60)],
    }
    for title, turns in chats.items():
        messages: list[dict[str, Any]] = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        if title == "Plants":
            aside = [{"role": "assistant", "content": "A hidden acorn."}]
            messages[1] |= {"branches": {"index": 1, "tails": [aside, None]}}
        file = json.dumps({"title": title, "updated": "2026-01-01", "messages": messages})
        await import_text(user, tmp_path, file, f"{title}.json")
        await user.tab.until(f"({TITLES}).includes({title!r})")
    expected = {
        "oak": {"Animals", "Plants"},
        "OLD oak": {"Animals", "Plants"},
        "oak otto": {"Animals"},
        "plan": {"Plants"},
        "acorn": {"Plants"},
        "nowhere": set(),
        "three": {"Numbers"},
    }
    for query, titles in expected.items():
        await user.tab.click("#search")
        await user.tab.evaluate("document.querySelector('#search').select()")
        await user.tab.type(query)
        assert set(await user.tab.evaluate(TITLES)) == titles, query
        assert await user.text("#found") == f"{len(titles)} of 3 conversations"
    assert await user.text("#conversations small") == "Three?"
    await user.tab.press("Enter")
    await user.tab.until("document.querySelectorAll('.bubble').length == 2")
    seen = "document.querySelectorAll('.bubble')[1].getBoundingClientRect().top"
    await user.tab.until(f"0 < {seen} && {seen} < 300")  # the match, not the end
    await user.tab.click("#search")
    await user.tab.press("Escape")
    assert len(await user.tab.evaluate(TITLES)) == 3
    assert not await user.tab.evaluate("document.querySelector('#found').checkVisibility()")
