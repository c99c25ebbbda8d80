"""Conversations that the chat page keeps: rename, export, import, search, delete."""

import json

from tests.e2e.page.user import User


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
