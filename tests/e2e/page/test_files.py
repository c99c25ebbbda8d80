"""Text files that messages of the chat page have."""

import json
from pathlib import Path

import pytest

from tests.support.servers.page_user import DROP, GatedEngine, User

HOSTILE = "<img src=x onerror=hit()>"
TEXT = "one ``` two\n"


async def attached(user: User, number: int) -> None:
    await user.tab.until(f"document.querySelectorAll('#attached li').length == {number}")


async def test_files_are_sent_with_the_message(
    user: User, engine: GatedEngine, tmp_path: Path
) -> None:
    """Chosen, shown, removed, sent, taken back by an edit, and kept."""
    engine.max_model_len = 4096
    (tmp_path / f"{HOSTILE}.txt".replace("/", "")).write_text(TEXT)
    (tmp_path / "b.py").write_bytes("b = 2\n".encode("utf-16"))
    await user.tab.choose("#attach-file", *sorted(tmp_path.iterdir(), reverse=True))
    await attached(user, 2)
    assert await user.text("#attached li:first-child") == "b.py\n14 B"
    assert HOSTILE in await user.text("#attached li:last-child")
    await user.tab.click("#attached li:first-child button")
    await attached(user, 1)
    await user.tab.click("#send")  # a file is enough
    await user.answered()
    [call] = engine.calls
    fenced = f'File "{HOSTILE}.txt":\n````\n{TEXT}````'
    assert engine.tokenizer.decode(call.prompt).endswith(f"user\n{fenced}\nassistant\n")
    assert await user.text("#conversations .title") == f"{HOSTILE}.txt"
    await user.reload()
    await user.tab.until("document.querySelector('.file')")
    assert await user.text(".file summary") == f"{HOSTILE}.txt\n12 B"
    await user.tab.click(".file summary")
    await user.tab.until("document.querySelector('.file pre').textContent")
    assert await user.text(".file pre") == TEXT
    await user.tab.click(".edit")
    await attached(user, 1)
    await user.tab.click("#input")
    await user.tab.type("What is it?")
    await user.tab.press("Enter")
    await user.tab.until("document.querySelector('.bubble').innerText == 'What is it?'")
    await user.answered()
    assert f"user\n{fenced}\n\nWhat is it?\n" in engine.tokenizer.decode(engine.calls[-1].prompt)
    assert await user.count("#thread img, #sidebar #conversations img") == 0


REFUSED = {
    "picture.png": (b"\x89PNG\r\n\x1a\n\0", "not a text file"),
    "zeros.txt": (b"a\0b", "not a text file"),
    "large.txt": (
        b"a" * (513 << 10),
        "(513 KiB) is not attached: a message’s files have up to 512",
    ),
}


@pytest.mark.full
async def test_what_cannot_be_attached_is_said(user: User, tmp_path: Path) -> None:
    for name, (content, reason) in REFUSED.items():
        (tmp_path / name).write_bytes(content)
        await user.tab.choose("#attach-file", tmp_path / name)
        await user.tab.until(f"document.querySelector('#toast').innerText.includes({name!r})")
        assert reason in await user.text("#toast")
        assert await user.count("#attached li") == 0
    assert await user.tab.evaluate("document.querySelector('#send').disabled")
    await user.tab.evaluate(DROP.format(json.dumps(["a"] * 11)))
    await attached(user, 10)
    await user.tab.until("document.querySelector('#toast').innerText.includes('up to 10 files')")
    assert not await user.tab.evaluate("document.body.classList.contains('dropping')")


@pytest.mark.full
async def test_files_are_exported_and_imported(user: User) -> None:
    """Imported files are untrusted: each field is checked."""
    shown = await user.tab.evaluate("""(async () => {
        const { exported, imported } = await import("/page/exchange.js");
        const answer = { role: "assistant", content: "b", end: "stop" };
        const file = { name: "a.txt", size: 3, text: "é\\n" };
        const messages = [{ role: "user", content: "", files: [file] }, answer];
        const kept = { title: "t", updated: 0, messages };
        const read = (text) => imported(new File([text], "x.json"))
            .then(({ messages }) => messages[0], (error) => error.message);
        const changed = (files) =>
            read(JSON.stringify({ messages: [{ role: "user", content: "", files }] }));
        return [
            await read(exported(kept)),
            await changed([]),
            await changed([{ name: 1, text: "" }]),
            await changed([{ name: "a", text: null }]),
            await changed(Array(11).fill(file)),
        ];
    })()""")
    file = {"name": "a.txt", "size": 3, "text": "é\n"}
    assert shown == [
        {"role": "user", "content": "", "files": [file]},
        "messages[0].files has to be a list of 1 to 10 files.",
        "messages[0].files[0].name has to be a text.",
        "messages[0].files[0].text has to be a text.",
        "messages[0].files has to be a list of 1 to 10 files.",
    ]
