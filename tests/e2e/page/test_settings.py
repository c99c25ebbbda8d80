"""Settings of the chat page, and its key."""

import pytest
from aiohttp import web

from gllm.frontend.app import make_app
from gllm.frontend.errors import Handler
from scripts import browser
from tests.frontend.conftest import CONFIG
from tests.support.servers.page_user import GatedEngine, User, using


async def test_settings_arrive_in_the_request(user: User, engine: GatedEngine) -> None:
    await user.say("Hi")
    await user.answered()
    given = {
        "temperature": 0.35, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "max_tokens": 4, "seed": -3,
        "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    await user.tab.click("#open-settings")
    await user.set("system", "Be brief.")
    for name, value in given.items():
        await user.set(name, str(value))
    await user.tab.press("Escape")
    assert await user.text("#settings-count") == str(len(given) + 1)
    await user.say("Hi")
    await user.answered()
    assert "Cut off" in await user.last(".notice")
    plain, asked = engine.calls
    defaults = type(asked.params)()
    assert {name: getattr(asked.params, name) for name in given} == given
    for name in given:
        assert getattr(plain.params, name) == getattr(defaults, name)
    prompts = [engine.tokenizer.decode(call.prompt) for call in engine.calls]
    assert ["Be brief." in prompt for prompt in prompts] == [False, True]
    await user.reload()
    await user.tab.until("document.querySelector('#setting-top_k')?.value == '7'")
    await user.tab.click("#open-settings")
    await user.tab.click("#reset-settings")
    await user.set("temperature", "9")
    assert "0 to 2" in await user.text("#setting-temperature-help")
    assert await user.text("#settings-count") == ""


@pytest.mark.full
async def test_top_k_can_be_off(user: User, engine: GatedEngine) -> None:
    """Off is sent; an empty field leaves the model's default, which may be another."""
    await user.tab.click("#open-settings")
    await user.set("top_k", "7")
    await user.tab.click("#setting-top_k-off")
    assert await user.tab.evaluate("document.querySelector('#setting-top_k').matches(':disabled')")
    assert await user.text("#settings-count") == "1"
    await user.reload()
    await user.tab.until("document.querySelector('#setting-top_k-off')?.checked")
    assert await user.tab.evaluate("document.querySelector('#setting-top_k').placeholder") == "off"
    await user.say("Hi")
    await user.answered()
    await user.tab.click("#open-settings")
    await user.tab.click("#setting-top_k-off")
    await user.set("top_k", "3")
    await user.tab.press("Escape")
    await user.say("Hi")
    await user.answered()
    await user.tab.click("#open-settings")
    await user.tab.click("#setting-top_k-off")
    await user.tab.click("#reset-settings")
    assert not await user.tab.evaluate("document.querySelector('#setting-top_k').disabled")
    assert await user.text("#settings-count") == ""
    await user.tab.press("Escape")
    await user.say("Hi")
    await user.answered()
    default = type(engine.calls[-1].params)().top_k
    assert [call.params.top_k for call in engine.calls] == [-1, 3, default]


async def test_a_key_and_a_prefix(engine: GatedEngine, tab: browser.Tab) -> None:
    """Behind a proxy: under a path, and with a key for all but the page."""
    keys: list[str] = []

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        keys.append(key := request.headers.get("Authorization", ""))
        if "/v1/" in request.path and key != "Bearer right":
            error = {"message": "this server needs a key", "code": "no_key", "param": None}
            return web.json_response({"error": error}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[guard])
    app.add_subapp("/some/where", make_app(engine, CONFIG))
    async with using(app, tab, "/some/where/") as user:
        await tab.go(user.url)
        for key in ("wrong", "right"):
            await tab.until("document.querySelector('#key-dialog').open")
            assert await user.text("#key-message") == "this server needs a key"
            await tab.click("#key")
            await tab.type(key)
            await tab.click("#key-form .strong")
        await tab.until("document.querySelector('#model').textContent == 'fake/model'")
        await user.say("Hi")
        assert await user.answered() == engine.reply
        await user.visit()
        assert not await tab.evaluate("document.querySelector('#key-dialog').open")
        assert "Bearer right" in keys
