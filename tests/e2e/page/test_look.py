"""The chat page on screens of all sizes, in both appearances, and for screen readers."""

import pytest

from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.support.servers.page_user import DROP, GatedEngine, User
from tests.support.text import tokenizers as some


async def test_controls_have_names(user: User, engine: GatedEngine) -> None:
    source = some.CHATML + "{{ enable_thinking }}"
    engine.tokenizer = Tokenizer(some.byte_level(), ChatTemplate(source, {}))
    await user.visit()
    await user.tab.evaluate(DROP.format(["a"]))
    await user.tab.until("document.querySelector('#attached li')")
    await user.say("Hi")
    await user.answered()
    await user.tab.click(".again")
    await user.tab.until("document.querySelector('.versions')")
    await user.answered()
    tree = (await user.tab.call("Accessibility.getFullAXTree"))["nodes"]
    seen = [node for node in tree if not node["ignored"]]
    roles = "button textbox searchbox radio heading region group combobox list"
    for role in roles.split():
        names = [node["name"]["value"] for node in seen if node["role"]["value"] == role]
        assert names, role
        assert all(names), role


@pytest.mark.full
@pytest.mark.parametrize("width", [360, 820])
async def test_nothing_is_wider_than_a_phone(user: User, engine: GatedEngine, width: int) -> None:
    await user.tab.size(width, 700, phone=True)
    engine.max_model_len = 4096
    engine.reply = "w" * 60 + "\n\n```\n" + "c" * 90 + "\n```\n\n|a|b|\n|-|-|\n|" + "t" * 50 + "|b|"
    engine.reply += "\n\n$$\n" + "x+" * 60 + "x\n$$\n"
    await user.tab.until(
        f"scroller.clientWidth == {width} && matchMedia('(pointer: coarse)').matches"
    )
    await user.tab.click("#input")
    await user.tab.press("Enter")
    assert await user.tab.evaluate("input.value") == "\n"  # touch keyboards have no Shift Enter
    assert await user.tab.evaluate("scroller.scrollWidth") == width  # with the examples
    await user.say("u" * 80)
    await user.answered()
    await user.tab.until("document.querySelector('.prose math')")
    await user.tab.click(".again")
    await user.tab.until("document.querySelector('.versions')")
    await user.answered()
    widest = "Math.max(document.documentElement.scrollWidth, scroller.scrollWidth)"
    await user.tab.until(f"{widest} == {width}")
    await user.tab.click("#open-sidebar")
    await user.tab.click("#conversations .title")
    await user.tab.click("#open-settings")
    await user.tab.until("fields.scrollWidth == fields.clientWidth")
    await user.tab.until(f"{widest} == {width}")


@pytest.mark.full
async def test_light_and_dark(user: User) -> None:
    async def brightness() -> int:
        return await user.tab.evaluate(
            "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
        )

    for scheme, low, high in (("light", 200, 255), ("dark", 0, 60)):
        await user.tab.prefer(scheme)
        assert low <= await brightness() <= high
    await user.tab.click("#theme label:has([value=light])")
    assert await brightness() >= 200
    await user.reload()
    await user.tab.until("document.querySelector('#theme [value=light]')?.checked")
    assert await brightness() >= 200
    await user.tab.click("#theme label:has([value=system])")
    assert await brightness() <= 60
