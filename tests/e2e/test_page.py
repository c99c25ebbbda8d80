"""The chat page in a real browser, on servers of real and of scripted engines."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gllm.frontend.app import make_app
from gllm.frontend.errors import Handler
from gllm.frontend.routes import page
from gllm.text.chat_template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from scripts import browser
from tests.e2e.pages import User
from tests.e2e.server import Server, serving, wait_until
from tests.e2e.test_serving import gauge
from tests.frontend.conftest import CONFIG
from tests.frontend.fake_engine import FakeEngine
from tests.text import tokenizers_for_tests as some


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    if browser.installed() is None:
        pytest.skip("there is no Chromium: `make browser` installs one")
    with browser.running() as address:
        yield address


@pytest.fixture
async def tab(chromium: str) -> AsyncIterator[browser.Tab]:
    async with browser.opened(chromium) as made:
        await made.size(1200, 800)
        yield made


@dataclass
class GatedEngine(FakeEngine):
    """Gives out as many tokens as a test allows."""

    gate: asyncio.Semaphore | None = None

    async def _tokens(self, prompt, params):
        async for delta in super()._tokens(prompt, params):
            if self.gate is not None:
                await self.gate.acquire()
            yield delta


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine(Tokenizer(some.byte_level(), ChatTemplate(some.CHATML, {})))


@asynccontextmanager
async def using(app: web.Application, tab: browser.Tab, path: str = "/") -> AsyncIterator[User]:
    """A user at the page of an application."""
    async with TestServer(app) as server:
        yield User(tab, str(server.make_url(path)))


@pytest.fixture
async def user(engine: GatedEngine, tab: browser.Tab) -> AsyncIterator[User]:
    async with using(make_app(engine, CONFIG), tab) as made:
        await made.visit()
        yield made
        assert tab.errors == []


async def idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(browser.DEADLINE):
        while engine.num_requests:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def demo(chromium: str) -> Iterator[Server]:
    with serving("demo", "--kv-cache-memory", "64MiB") as server:
        yield server


async def test_a_conversation(demo: Server, tab: browser.Tab) -> None:
    """With the demo model: sent by a click, streamed, measured, and kept."""
    user = User(tab, f"{demo.url}/")
    await user.visit()
    assert await user.text("#model") == "demo"
    assert await user.text("#state-text") == "ready"
    await user.say("Tell me a story about Otto the fox.")
    story = await user.answered()
    assert "Otto" in story
    stats = await user.last(".stats")
    for figure in ("TTFT", "tokens", "prompt"):
        assert figure in stats
    await user.say("What is the opposite of big?")
    await user.answered()
    assert "cached" in await user.last(".stats")
    assert "of 1,024 tokens" in await user.text("#context")
    before = await user.messages()
    assert (len(before), before[1]) == (4, story)
    await tab.call("Page.reload")
    await tab.until("document.querySelectorAll('.message').length == 4")
    assert await user.messages() == before
    assert await user.text("#conversations .title") == "Tell me a story about Otto the fox."
    assert tab.errors == []
    assert all(url.startswith(f"{demo.url}/") for url in tab.requests)


@pytest.fixture(scope="module")
def endless(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a long context and nothing that ends an answer."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "endless")
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "max_position_embeddings": 65536, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "generation_config.json").unlink()
    return folder


async def test_stop(endless: Path, tab: browser.Tab) -> None:
    with serving(endless, "--kv-cache-memory", "64MiB") as server:
        user = User(tab, f"{server.url}/")
        await asyncio.to_thread(server.post, "/v1/completions", {"prompt": [9], "max_tokens": 1})
        await user.visit()
        await user.say("Hello")
        await tab.until("document.querySelector('.growing .rate')")
        assert await asyncio.to_thread(gauge, server, "num_requests_running") == 1
        await tab.click("#stop")
        text = await user.answered()
        assert text
        stats = await user.last(".stats")
        for figure in ("TTFT", "tokens/s", "tokens", "prompt", "stopped"):
            assert figure in stats
        await asyncio.to_thread(wait_until, lambda: gauge(server, "num_requests_running") == 0)
        assert await user.last(".prose") == text


async def test_an_answer_grows_and_is_followed(user: User, engine: GatedEngine) -> None:
    engine.gate, engine.reply = asyncio.Semaphore(0), "Hello world\n\n" * 40
    await user.say("Hi")
    assert await user.count(".waiting") == 1
    seen = ""
    at_end = "scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 8"
    for _ in range(4):
        for _ in range(30):
            engine.gate.release()
        shown = "document.querySelector('.prose').innerText.length"
        await user.tab.until(f"{shown} > {len(seen)}")
        text = await user.last(".prose")
        assert text.startswith(seen.rstrip())
        seen = text
    await user.tab.until(at_end)
    await user.tab.evaluate("scroller.scrollTo(0, 0)")
    for _ in range(1000):
        engine.gate.release()
    assert (await user.answered()).count("Hello world") == 40
    assert await user.tab.evaluate("scroller.scrollTop") == 0
    await user.tab.click("#to-end")
    await user.tab.until(at_end)
    assert not await user.tab.evaluate("document.querySelector('#to-end').checkVisibility()")


AT_END = "scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 8"


async def test_the_answer_to_a_long_first_message_is_shown(
    user: User, engine: GatedEngine
) -> None:
    """The first message makes the thread visible; its end has to be in view from then on."""
    engine.gate, engine.reply = asyncio.Semaphore(0), "Hello world\n\n" * 20
    await user.tab.size(1200, 420)
    await user.say("A long message.\n" * 14)
    assert await user.tab.evaluate("scroller.scrollHeight > scroller.clientHeight")
    await user.tab.until(AT_END)
    for _ in range(1000):
        engine.gate.release()
    await user.answered()
    await user.tab.until(AT_END)
    await user.tab.click("#new-chat")
    await user.tab.click("#conversations .title")
    await user.tab.until(AT_END)


async def test_keys(user: User, engine: GatedEngine) -> None:
    engine.gate = asyncio.Semaphore(3)
    await user.tab.click("#input")
    await user.tab.type("one")
    await user.tab.press("Enter", shift=True)
    await user.tab.type("two")
    await user.tab.press("Enter")
    await user.tab.until("document.querySelector('.growing .prose').innerText")
    assert await user.text(".bubble") == "one\ntwo"
    await user.tab.press("Escape")
    await user.answered()
    await idle(engine)
    assert "stopped" in await user.last(".stats")
    assert not engine.calls[0].finished


async def test_controls_have_names(user: User) -> None:
    await user.say("Hi")
    await user.answered()
    tree = (await user.tab.call("Accessibility.getFullAXTree"))["nodes"]
    seen = [node for node in tree if not node["ignored"]]
    for role in ("button", "textbox", "radio", "heading", "region"):
        names = [node["name"]["value"] for node in seen if node["role"]["value"] == role]
        assert names, role
        assert all(names), role


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
    await user.tab.call("Page.reload")
    await user.tab.until("document.querySelector('#setting-top_k')?.value == '7'")
    await user.tab.click("#open-settings")
    await user.tab.click("#reset-settings")
    await user.set("temperature", "9")
    assert "0 to 2" in await user.text("#setting-temperature-help")
    assert await user.text("#settings-count") == ""


HOSTILE = (
    '<b>bold</b> <img src=x onerror="hit()"> <script>hit()</script>\n\n'
    "[link](javascript:hit()) ![image](https://example.invalid/x.png) <svg onload=hit()>\n\n"
    "```html\n</code></pre><script>hit()</script>\n```\n\n"
    "| <i>a</i> | b |\n| - | - |\n| <a href=javascript:hit()>x</a> | `<u>` |"
)


async def test_html_stays_text(user: User, engine: GatedEngine) -> None:
    await user.tab.evaluate("window.hit = () => console.error('code of the model ran')")
    engine.reply = HOSTILE
    await user.say("<img src=x onerror='hit()'><h3>me</h3>")
    text = await user.answered()
    assert '<img src=x onerror="hit()"> <script>hit()</script>' in text
    assert "</code></pre><script>hit()</script>" in text
    assert "[link](javascript:hit())" in text
    assert "<img src=x onerror='hit()'>" in await user.text(".bubble")
    for tag in ("img", "script", "b", "i", "u", "h3", ".prose svg:not(.icon)", "a[href^=java]"):
        assert await user.count(f"#thread {tag}") == 0, tag
    assert await user.count("#thread a[rel~=noopener]") == 1  # the image's address
    await user.tab.call("Page.reload")
    await user.tab.until("document.querySelectorAll('.message').length == 2")
    assert (await user.messages())[1] == text
    assert not any("invalid" in url or url.endswith("/x") for url in user.tab.requests)


async def test_reasoning_is_folded(tab: browser.Tab) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in (
            {"reasoning_content": "Let me "},
            {"reasoning_content": "see."},
            {"content": "Yes."},
        ):
            chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]})
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "thinker"}]})

    app = web.Application()
    app.router.add_get("/", page.index)
    app.router.add_get("/page/{path:.+}", page.file)
    app.router.add_get("/ready", models)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    async with using(app, tab) as user:
        await user.visit()
        await user.say("Is it?")
        assert await user.answered() == "Yes."
        assert (await user.last("summary")).startswith("Thought for")
        assert await user.last(".reasoning pre") == ""
        await tab.click(".reasoning summary")
        await tab.until("document.querySelector('.reasoning').open")
        assert await user.last(".reasoning pre") == "Let me see."


@pytest.mark.parametrize("width", [360, 820])
async def test_nothing_is_wider_than_a_phone(user: User, engine: GatedEngine, width: int) -> None:
    await user.tab.size(width, 700, phone=True)
    engine.reply = "w" * 60 + "\n\n```\n" + "c" * 90 + "\n```\n\n|a|b|\n|-|-|\n|" + "t" * 50 + "|b|"
    await user.tab.click("#input")
    await user.tab.press("Enter")
    assert await user.tab.evaluate("input.value") == "\n"  # touch keyboards have no Shift Enter
    await user.say("u" * 80)
    await user.answered()
    widest = "Math.max(document.documentElement.scrollWidth, scroller.scrollWidth)"
    assert await user.tab.evaluate(widest) == width
    await user.tab.click("#open-sidebar")
    await user.tab.click("#conversations .title")
    await user.tab.click("#open-settings")
    assert await user.tab.evaluate("fields.scrollWidth == fields.clientWidth")
    assert await user.tab.evaluate(widest) == width


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
    await user.tab.call("Page.reload")
    await user.tab.until("document.querySelector('#theme [value=light]')?.checked")
    assert await brightness() >= 200
    await user.tab.click("#theme label:has([value=system])")
    assert await brightness() <= 60


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


async def test_a_conversation_that_does_not_fit(user: User, engine: GatedEngine) -> None:
    engine.max_model_len = 60
    await user.visit()
    await user.say("A message that is far longer than what this model can hold in its context")
    await user.answered()
    notice = await user.last(".notice")
    assert "no longer fits" in notice
    assert "context is 60 tokens" in notice
    await user.tab.click(".choices button:nth-child(2)")
    await user.tab.evaluate("document.querySelector('#input').select()")
    await user.tab.type("Hi")
    await user.tab.press("Enter")
    assert await user.answered() == engine.reply
    assert await user.messages() == ["Hi", engine.reply]
    user.tab.errors.clear()  # the browser tells of the 400


async def test_errors_are_told_in_the_servers_words(user: User, engine: GatedEngine) -> None:
    engine.fail_after = 2
    await user.say("Hi")
    assert await user.answered()
    assert "broke off" in await user.last(".notice")
    assert "logits are not finite" in await user.last(".notice")
    engine.fail_after = None
    await user.tab.click(".choices button")
    await user.tab.until("!document.querySelector('.notice').checkVisibility()")
    assert await user.answered() == engine.reply
    engine.state = "draining"
    await user.say("Again")
    await user.answered()
    assert "shutting down" in await user.last(".notice")
    await user.tab.until("document.querySelector('#state').dataset.state == 'draining'")
    user.tab.errors.clear()  # the browser tells of the 503


async def test_answer_again_and_edit(user: User, engine: GatedEngine) -> None:
    await user.say("First")
    await user.answered()
    engine.reply = "Another answer"
    await user.tab.click(".again")
    await user.tab.until("document.querySelector('.prose').innerText == 'Another answer'")
    await user.say("Second")
    await user.answered()
    await user.tab.click(".message:nth-child(3) .edit")
    assert await user.tab.evaluate("input.value") == "Second"
    await user.tab.type(", edited")
    await user.tab.press("Enter")
    await user.tab.until("document.querySelectorAll('.bubble')[1]?.innerText == 'Second, edited'")
    await user.answered()
    assert await user.messages() == ["First", engine.reply, "Second, edited", engine.reply]
    told = engine.tokenizer.decode(engine.calls[-1].prompt)
    assert (told.count("First"), told.count("Second"), told.count("Hello")) == (1, 1, 0)


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


MARKDOWN = {
    "a *b* **c** ***d*** `e` ~~f~~": "<p>a <em>b</em> <strong>c</strong> "
    "<strong><em>d</em></strong> <code>e</code> <del>f</del></p>",
    "2 * 3 * 4, a_b_c, **open, ``x`y``": "<p>2 * 3 * 4, a_b_c, **open, <code>x`y</code></p>",
    "\\*a\\* line\nnext": "<p>*a* line<br>next</p>",
    "# One\n### Three": "<h3>One</h3><h5>Three</h5>",
    "- a\n- b\n  - c\n\n  - d": "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li></ul>",
    "3. a\n   - b\n4. c": '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "- a\n\n  b\n\nc": "<ul><li>a<p>b</p></li></ul><p>c</p>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "|a|b|\n|:-|-:|\n|1|`x`|": '<div class="table"><table><thead><tr><th class="left">a</th>'
    '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td>'
    '<td class="right"><code>x</code></td></tr></tbody></table></div>',
    "a | b\nno table": "<p>a | b<br>no table</p>",
    "<i>&amp;</i>": "<p>&lt;i&gt;&amp;amp;&lt;/i&gt;</p>",
}


async def test_markdown(user: User) -> None:
    show = """(async () => {{
        const {{ Markdown }} = await import("/page/markdown.js");
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        const text = {};
        new Markdown(whole).show(text);
        const growing = new Markdown(grown);
        for (let end = 0; end <= text.length; end++) growing.show(text.slice(0, end));
        return [whole.innerHTML, grown.innerHTML];
    }})()"""
    for source, wanted in MARKDOWN.items():
        whole, grown = await user.tab.evaluate(show.format(json.dumps(source)))
        assert whole == wanted, source
        assert grown == wanted, source
    code = "```py extra\n<b>\n\n  x\n```\nend"
    whole, grown = await user.tab.evaluate(show.format(json.dumps(code)))
    assert whole == grown
    assert "<span>py</span>" in whole
    assert "<code>&lt;b&gt;\n\n  x</code>" in whole
    for hostile in (
        ">" * 20000,
        "*a " * 20000,
        "[" * 20000,
        "`" * 9999 + "a",
        "- " * 5000,
        "|" * 9999,
    ):
        whole, _ = await user.tab.evaluate(
            show.format(json.dumps(hostile)).replace("end++", "end += 5000")
        )
        assert whole


async def test_events_are_read_however_they_are_cut(user: User) -> None:
    body = 'data: {"a": "é"}\n\n: comment\ndata:x\ndata: y\r\n\r\nevent: z\rdata: end\r\r'
    wanted = ['{"a": "é"}', "x\ny", "end"]
    found = await user.tab.evaluate(f"""(async () => {{
        const {{ EventParser, eventsOf }} = await import("/page/sse.js");
        const body = {json.dumps(body)} + "\\n";
        const all = [];
        for (let cut = 0; cut <= body.length; cut++) {{
            const parser = new EventParser();
            all.push([...parser.push(body.slice(0, cut)), ...parser.push(body.slice(cut))]);
        }}
        const bytes = new TextEncoder().encode(body);
        const stream = new ReadableStream({{
            start(to) {{ bytes.forEach((byte) => to.enqueue(Uint8Array.of(byte))); to.close(); }},
        }});
        const last = [];
        for await (const data of eventsOf(new Response(stream))) last.push(data);
        return [...all, last];
    }})()""")
    assert all(events == wanted for events in found)
    assert len(found) == len(body) + 3
