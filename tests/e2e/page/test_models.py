"""The model that the chat page asks: choice among several, thinking, examples."""

import json
from typing import Any

import pytest
from aiohttp import web

from gllm.frontend.routes import page
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from scripts import browser
from tests.support.servers.page_user import GatedEngine, User, using
from tests.support.text import tokenizers as some

SWITCH = "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"


async def pick(user: User, selector: str, value: str) -> None:
    """Choose an option as the keyboard does."""
    await user.tab.evaluate(f"""(() => {{
        const select = document.querySelector({selector!r});
        select.value = {value!r};
        select.dispatchEvent(new Event("change"));
    }})()""")


async def test_thinking_is_switched(user: User, engine: GatedEngine) -> None:
    """By the variable of the template, and only where it has one."""
    assert not await user.tab.evaluate("document.querySelector('#thinking').checkVisibility()")
    engine.tokenizer = Tokenizer(some.byte_level(), ChatTemplate(SWITCH + some.CHATML, {}))
    await user.visit()
    await user.tab.until("document.querySelector('#thinking').checkVisibility()")
    for choice in ("off", "on"):
        await pick(user, "#thinking-choice", choice)
        await user.say("Hi")
        await user.answered()
    await user.reload()
    assert await user.tab.evaluate("document.querySelector('#thinking-choice').value") == "on"
    await pick(user, "#thinking-choice", "")
    await user.say("Hi")
    await user.answered()
    prompts = [engine.tokenizer.decode(call.prompt) for call in engine.calls]
    assert [prompt.split("user\n")[0] for prompt in prompts] == ["[False]", "[True]", ""]


FIELDS = {
    ("", "on"): {},
    ("enable_thinking", "high"): {},
    ("enable_thinking thinking", "off"): {
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False}
    },
    ("reasoning_effort", "off"): {},
    ("reasoning_effort", "high"): {"reasoning_effort": "high"},
    ("thinking reasoning_effort", "off"): {"chat_template_kwargs": {"thinking": False}},
    ("thinking reasoning_effort", "on"): {},
    ("thinking reasoning_effort", ""): {},
}
"""Fields of a request, by the variables of the model's template and the choice."""


@pytest.mark.full
async def test_fields_of_thinking(user: User) -> None:
    cases = [[controls.split(), choice] for controls, choice in FIELDS]
    fields = await user.tab.evaluate(f"""(async () => {{
        const {{ thinkingFields }} = await import("/page/thinking.js");
        return {json.dumps(cases)}.map((given) => thinkingFields(...given));
    }})()""")
    assert fields == list(FIELDS.values())


class ManyModels:
    """A server of several models, with what was asked of it."""

    def __init__(self) -> None:
        self.cards: list[dict[str, Any]] = [
            {"id": "one", "max_model_len": 100, "vocab_size": 2048},
            {"id": "two", "max_model_len": 200},
        ]
        self.asked: list[dict[str, Any]] = []
        self.delta = {"content": "Yes."}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", page.get_chat_page)
        app.router.add_get("/page/{path:.+}", page.get_chat_page_file)
        app.router.add_get("/ready", self.models)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.cards})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": self.delta, "finish_reason": "length"}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_one_of_several_models_is_chosen(tab: browser.Tab) -> None:
    """Its name is kept; an answer is continued by the model that began it."""
    server = ManyModels()
    async with using(server.app(), tab) as user:
        await user.visit()
        await tab.until("document.querySelector('#models').checkVisibility()")
        assert await user.text("#welcome-model") == "one"
        await user.say("Hi")
        await user.answered()
        await pick(user, "#models", "two")
        assert await user.text("#model") == "two"
        await tab.click(".choices button")
        await tab.until("document.querySelector('.prose').innerText == 'Yes.Yes.'")
        await user.answered()
        await user.say("Hi")
        await user.answered()
        assert await user.last(".stats .model") == "two"
        await user.reload()
        assert await user.text("#model") == "two"
        server.cards = [{"id": "three"}]
        await tab.reload()
        await tab.until("document.querySelector('#model').textContent == 'three'")
        assert not await tab.evaluate("document.querySelector('#models').checkVisibility()")
        assert tab.errors == []
    assert [asked["model"] for asked in server.asked] == ["one", "one", "two"]
    begun, continued, _ = server.asked
    assert "continue_final_message" not in begun
    assert continued["continue_final_message"]
    assert continued["messages"] == [
        *begun["messages"], {"role": "assistant", "content": "Yes."}
    ]  # fmt: skip


@pytest.mark.full
async def test_reasoning_that_was_cut_off_is_continued(tab: browser.Tab) -> None:
    """A content that is null tells the server to go on there."""
    server = ManyModels()
    server.delta = {"reasoning_content": "Let me "}
    async with using(server.app(), tab) as user:
        await user.visit()
        await user.say("Hi")
        await user.answered()
        server.delta = {"reasoning_content": "see."}
        await tab.click(".choices button")
        await tab.click(".reasoning summary")
        await tab.until("document.querySelector('.thoughts').innerText == 'Let me see.'")
        await user.answered()
    assert server.asked[1]["messages"][-1] == {
        "role": "assistant", "content": None, "reasoning_content": "Let me ",
    }  # fmt: skip


@pytest.mark.full
async def test_examples_suit_the_model(tab: browser.Tab) -> None:
    """A model of few words is asked for stories, any other for what models are used for."""
    server = ManyModels()
    async with using(server.app(), tab) as user:
        await user.visit()
        await tab.until("document.querySelector('.example')")
        assert "Otto" in await user.text("#examples")
        await pick(user, "#models", "two")
        assert "Otto" not in await user.text("#examples")
        assert await user.count(".example") == 4
