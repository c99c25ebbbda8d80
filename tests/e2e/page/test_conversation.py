"""Conversations on the chat page in a real browser, on servers of real and of scripted engines."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from scripts import browser
from tests.support.servers.metrics import gauge
from tests.support.servers.page_user import LAST, GatedEngine, User, idle
from tests.support.servers.pool import DEMO_TWO_STAGES, share
from tests.support.servers.server import Server, serving, wait_until

server = share(DEMO_TWO_STAGES)


async def test_a_conversation(server: Server, tab: browser.Tab) -> None:
    """With the demo model: an example sent by a click, streamed, measured, and kept."""
    user = User(tab, f"{server.url}/")
    await user.visit()
    assert await user.text("#model") == "demo"
    assert await user.text("#state-text") == "ready"
    assert await user.count(".example") == 4
    await tab.click("#examples li:first-child .example")  # as the demo knows stories alone
    await tab.until("document.querySelector('.message.assistant')")
    assert await user.text(".bubble") == "Tell me a story about Otto the fox."
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
    await user.reload()
    await tab.until("document.querySelectorAll('.message').length == 4")
    assert await user.messages() == before
    assert await user.text("#conversations .title") == "Tell me a story about Otto the fox."
    assert tab.errors == []
    assert all(url.startswith(f"{server.url}/") for url in tab.requests)
    await tab.click("#new-chat")
    await tab.until("document.querySelector('.example').checkVisibility()")


@pytest.fixture(scope="module")
def endless(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a long context and nothing that ends an answer."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "endless")
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "max_position_embeddings": 65536, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "generation_config.json").unlink()
    return folder


@pytest.mark.full
async def test_stop(endless: Path, tab: browser.Tab) -> None:
    with serving(endless, "--kv-cache-memory", "64MiB") as server:
        user = User(tab, f"{server.url}/")
        await asyncio.to_thread(server.post, "/v1/completions", {"prompt": [9], "max_tokens": 1})
        await user.visit()
        await user.say("Hello")
        await tab.until("document.querySelector('.growing .rate')")
        # A report may still count the request with which `gauge` asks for one.
        await asyncio.to_thread(wait_until, lambda: gauge(server, "num_requests_running") == 1)
        await tab.click("#stop")
        text = await user.answered()
        assert text
        stats = await user.last(".stats")
        for figure in ("TTFT", "tokens/s", "tokens", "prompt", "stopped"):
            assert figure in stats
        await asyncio.to_thread(wait_until, lambda: gauge(server, "num_requests_running") == 0)
        assert await user.last(".prose") == text


AT_END = "scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 8"


async def test_an_answer_grows_and_is_followed(user: User, engine: GatedEngine) -> None:
    gate = engine.gate = asyncio.Semaphore(0)
    engine.reply = "Hello world\n\n" * 40
    await user.say("Hi")
    assert await user.count(".waiting") == 1
    token_ids = engine.tokenizer.encode(engine.reply)
    seen = ""

    async def grow(num_tokens: int) -> None:
        """Let the answer have 30 more tokens; wait until the page shows all of `num_tokens`."""
        nonlocal seen
        for _ in range(30):
            gate.release()
        letters = "".join(engine.tokenizer.decode(token_ids[:num_tokens]).split())
        shown = "document.querySelector('.prose').innerText.replace(/\\s/g, '')"
        await user.tab.until(f"{shown} == {letters!r}")
        text = await user.last(".prose")
        assert text.startswith(seen.rstrip())
        assert len(text) > len(seen)
        seen = text

    for num_tokens in (30, 60, 90, 120):
        await grow(num_tokens)
    # A text that fits into the window ends where it begins, so nobody can leave its end.
    end = await user.tab.until(f"scroller.scrollTop > 100 && {AT_END} && scroller.scrollTop")
    await user.tab.scroll("#scroller", -20)
    stays = f"Math.abs(scroller.scrollTop - {end - 20}) < 2"
    await user.tab.until(stays)
    await grow(150)
    assert await user.tab.evaluate(stays)
    # The end moves on while the page scrolls to where it was.
    await user.tab.evaluate("scroller.scrollTo(0, 0)")
    await user.tab.click("#to-end")
    for _ in range(1000):
        gate.release()
    assert (await user.answered()).count("Hello world") == 40
    await user.tab.until(AT_END)
    await user.tab.until("!document.querySelector('#to-end').checkVisibility()")


@pytest.mark.full
async def test_the_answer_to_a_long_first_message_is_shown(user: User, engine: GatedEngine) -> None:
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


@pytest.mark.full
async def test_who_scrolls_up_as_the_answer_ends_stays_there(
    user: User, engine: GatedEngine
) -> None:
    """The answer ends before the browser reports the scroll, which it does with the next frame."""
    engine.gate = asyncio.Semaphore(3)
    await user.tab.size(1200, 420)
    await user.say("A long message.\n" * 14)
    await user.tab.until(f"{LAST}.querySelector('.prose').innerText && {AT_END}")
    escape = "new KeyboardEvent('keydown', { key: 'Escape' })"
    await user.tab.evaluate(f"scroller.scrollTo(0, 0), document.dispatchEvent({escape})")
    await user.answered()
    assert await user.tab.evaluate("scroller.scrollTop") == 0
    await idle(engine)


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


@pytest.mark.full
async def test_a_conversation_that_does_not_fit(user: User, engine: GatedEngine) -> None:
    user.refusals.add(400)
    engine.max_model_len = 60
    await user.visit()
    await user.say("A message that is far longer than what this model can hold in its context")
    await user.answered()
    notice = await user.last(".notice")
    assert "no longer fits" in notice
    assert "context length is 60 tokens" in notice
    await user.tab.click(".choices button:nth-child(2)")
    await user.tab.evaluate("document.querySelector('#input').select()")
    await user.tab.type("Hi")
    await user.tab.press("Enter")
    assert await user.answered() == engine.reply
    assert await user.messages() == ["Hi", engine.reply]


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
    user.refusals.add(503)
    engine.state = "draining"
    await user.say("Again")
    await user.answered()
    assert "shutting down" in await user.last(".notice")
    await user.tab.until("document.querySelector('#state').dataset.state == 'draining'")


@pytest.mark.full
async def test_a_recovery_is_shown_while_an_answer_pauses(user: User, engine: GatedEngine) -> None:
    """And what is read meanwhile stays where it is when the server is ready again."""
    user.refusals.add(503)
    await user.tab.size(1200, 420)
    await user.say("A message.\n" * 12)
    assert await user.answered() == engine.reply
    engine.state = "recovering"
    await user.say("Again")
    await user.tab.until("document.querySelector('#state').dataset.state == 'recovering'")
    assert await user.text("#state-text") == "recovering"
    await user.tab.until(f"scroller.scrollTop > 0 && {AT_END}")
    await user.tab.evaluate("scroller.scrollTo(0, 0), (first = document.querySelector('.bubble'))")
    engine.state = "ready"
    assert await user.answered() == engine.reply
    await user.tab.until("document.querySelector('#state').dataset.state == 'ready'")
    async with asyncio.timeout(browser.DEADLINE):
        while sum(url.endswith("/v1/models") for url in user.tab.requests) < 2:
            await asyncio.sleep(0.01)
    assert await user.tab.evaluate("scroller.scrollTop") == 0
    assert await user.tab.evaluate("first === document.querySelector('.bubble')")


async def test_a_cut_off_answer_is_continued(user: User, engine: GatedEngine) -> None:
    """Its text goes back as the last message, and what follows joins it."""
    await user.tab.click("#open-settings")
    await user.set("max_tokens", "3")
    await user.tab.press("Escape")
    await user.say("Hi")
    begun = await user.answered()
    assert 0 < len(begun) < len(engine.reply)
    assert await user.last(".choices button") == "Continue"
    assert "3 tokens" in await user.last(".stats")
    engine.reply = " and the rest"
    await user.tab.click(".choices button")
    await user.tab.until(
        f"{LAST}.querySelector('.prose').innerText.includes('rest') || "
        f"{LAST}.querySelector('.stats').innerText.includes('6 tokens')"
    )
    text = await user.answered()
    assert text.startswith(f"{begun} and")
    prompts = [engine.tokenizer.decode(call.prompt) for call in engine.calls]
    assert prompts[1] == prompts[0] + begun
    assert "6 tokens" in await user.last(".stats")
    assert await user.count(".versions") == 0
    # What the user stopped goes on by the button below it, and only at the end.
    await user.tab.evaluate("document.querySelector('.continue').click()")
    await user.tab.until("document.querySelector('.stats').innerText.includes('9 tokens')")
    engine.gate = asyncio.Semaphore(1)
    await user.say("Again")
    await user.tab.until(f"{LAST}.querySelector('.prose').innerText")
    await user.tab.press("Escape")
    await user.answered()
    assert await user.tab.evaluate(
        "[...document.querySelectorAll('.continue')].map((node) => node.checkVisibility())"
    ) == [False, True]
    await idle(engine)


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


@pytest.mark.full
async def test_branches(user: User, engine: GatedEngine) -> None:
    """Edited questions and regenerated answers keep what was there, with all that followed it."""

    async def versions() -> list[str]:
        return await user.tab.evaluate(
            "[...document.querySelectorAll('.versions span')].map((node) => node.innerText)"
        )

    async def turn(selector: str, wanted: str) -> None:
        await user.tab.click(selector)
        await user.tab.until(f"document.querySelector('#thread').innerText.includes({wanted!r})")

    replies = iter(("A1", "A2", "A3", "B1", "A4"))
    engine.reply = next(replies)
    await user.say("Q1")
    await user.answered()
    engine.reply = next(replies)
    await user.say("Q2")
    await user.answered()
    assert await versions() == []
    engine.reply = next(replies)
    await user.tab.click(".message:nth-child(4) .again")
    await user.tab.until("document.querySelectorAll('.prose')[1].innerText == 'A3'")
    await user.answered()
    engine.reply = next(replies)
    await user.tab.click(".message:nth-child(1) .edit")
    await user.tab.type(", edited")
    await user.tab.press("Enter")
    await user.tab.until("document.querySelector('.bubble').innerText == 'Q1, edited'")
    await user.answered()
    assert await user.messages() == ["Q1, edited", "B1"]
    assert await versions() == ["2 / 2"]
    await turn(".previous", "A3")
    assert await user.messages() == ["Q1", "A1", "Q2", "A3"]
    assert await versions() == ["1 / 2", "2 / 2"]
    await turn(".message:nth-child(4) .previous", "A2")
    # The keyboard stays at the switch: at its other arrow where there is no further version.
    focused = "document.activeElement.closest('.message:nth-child(4)') && document.activeElement"
    assert await user.tab.evaluate(f"({focused}).className") == "plain small next"
    assert await versions() == ["1 / 2", "1 / 2"]
    engine.reply = next(replies)
    await user.say("Q3")
    await user.answered()
    prompt = engine.tokenizer.decode(engine.calls[-1].prompt)
    assert [text in prompt for text in ("Q1", "A1", "Q2", "A2", "A3", "B1")] == [True] * 4 + [
        False
    ] * 2
    await user.reload()
    await user.tab.until("document.querySelectorAll('.message').length == 6")
    assert await user.messages() == ["Q1", "A1", "Q2", "A2", "Q3", "A4"]
    await turn(".message:nth-child(1) .next", "B1")
    await turn(".message:nth-child(1) .previous", "A4")
    assert await user.messages() == ["Q1", "A1", "Q2", "A2", "Q3", "A4"]


@pytest.mark.full
async def test_a_failure_leaves_no_version(user: User, engine: GatedEngine) -> None:
    user.refusals.add(503)
    engine.state = "draining"
    await user.say("Hi")
    await user.answered()
    engine.state = "ready"
    await user.tab.click(".choices button")
    await user.tab.until("!document.querySelector('.notice').checkVisibility()")
    assert await user.answered() == engine.reply
    assert await user.count(".versions") == 0


@pytest.mark.full
async def test_versions_hold_still_while_an_answer_grows(user: User, engine: GatedEngine) -> None:
    engine.gate = asyncio.Semaphore(1000)
    await user.say("Q1")
    await user.answered()
    engine.gate = asyncio.Semaphore(0)
    await user.tab.click(".again")
    await user.tab.until("document.querySelector('.versions')")
    hidden = "!document.querySelector('.previous').checkVisibility({ visibilityProperty: true })"
    assert await user.tab.evaluate(hidden)
    await user.tab.press("Escape")
    await user.answered()
    await user.tab.click(".previous")
    assert await user.messages() == ["Q1", engine.reply]
    await idle(engine)


@pytest.mark.full
async def test_long_messages_fold(user: User, engine: GatedEngine) -> None:
    """A long question is folded until the user unfolds it, a long answer the other way round."""
    engine.max_model_len = 4096
    engine.reply = "Hello\n\n" * 60
    await user.say("Line\n" * 40 + "end")
    await user.answered()
    bubble, prose = ".user .bubble", ".assistant .prose"
    height = "document.querySelector({!r}).clientHeight"
    assert await user.tab.evaluate(height.format(bubble)) < 300
    assert await user.tab.evaluate(height.format(prose)) > 600
    assert await user.text(".user .fold") == "Show all"
    await user.tab.click(".user .fold")
    assert await user.tab.evaluate(height.format(bubble)) > 600
    expanded = "document.querySelector('.user .fold').getAttribute('aria-expanded')"
    assert await user.tab.evaluate(expanded) == "true"
    await user.tab.click(".assistant .fold")
    assert await user.tab.evaluate(height.format(prose)) < 300
    # What the user chose holds when the thread is shown anew.
    engine.reply = "Short"
    await user.say("Hi")
    assert await user.answered() == "Short"
    assert await user.tab.evaluate(height.format(bubble)) > 600
    assert await user.tab.evaluate(height.format(prose)) < 300
    assert await user.tab.evaluate("document.querySelectorAll('.fold:not([hidden])').length") == 2
