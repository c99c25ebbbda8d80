"""A user at the chat page: a browser's tab, and what a person does and sees there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts import browser
from scripts.browser import Tab
from tests.support.http.fake_engine import FakeEngine

LAST = "document.querySelector('.message:last-child')"
DROP = """(() => {{
    const dataTransfer = new DataTransfer();
    {}.forEach((text, i) => dataTransfer.items.add(new File([text], `${{i}}.txt`)));
    const event = (type) =>
        new DragEvent(type, {{ dataTransfer, bubbles: true, cancelable: true }});
    document.body.dispatchEvent(event("dragover"));
    if (!document.querySelector("#drop").checkVisibility()) throw new Error("nothing is said");
    document.body.dispatchEvent(event("drop"));
}})()"""
"""Drop files with these texts on the page."""


class User:
    """Uses the page in a tab."""

    def __init__(self, tab: Tab, url: str) -> None:
        self.tab = tab
        self.url = url
        self.refusals: set[int] = set()
        """Statuses that requests of the page end with; the browser logs each of them."""

    async def visit(self) -> None:
        """Open the page and wait until it knows its server."""
        await self.tab.go(self.url)
        await self._know_server()

    async def reload(self) -> None:
        """Load the page again and wait until it knows its server."""
        await self.tab.reload()
        await self._know_server()

    async def _know_server(self) -> None:
        await self.tab.until("document.querySelector('#welcome-model').textContent != 'the model'")

    def unexpected_errors(self) -> list[str]:
        """Errors of the page that are not `refusals`."""
        expected = [f"responded with a status of {status} " for status in self.refusals]
        return [told for told in self.tab.errors if not any(text in told for text in expected)]

    async def say(self, text: str) -> None:
        """Write and send."""
        await self.tab.click("#input")
        await self.tab.type(text)
        await self.tab.click("#send")
        await self.tab.until(f"{LAST}?.classList.contains('assistant')")

    async def answered(self) -> str:
        """Wait for the answer's end; its text as shown."""
        await self.tab.until(f"!{LAST}.classList.contains('growing')")
        return await self.last(".prose")

    async def last(self, selector: str) -> str:
        """A text in the last message; "" where there is none."""
        node = f"{LAST}.querySelector({selector!r})"
        return await self.tab.evaluate(f"{node}?.checkVisibility() ? {node}.innerText : ''")

    async def text(self, selector: str) -> str:
        """A text of the page."""
        return await self.tab.evaluate(f"document.querySelector({selector!r}).innerText")

    async def count(self, selector: str) -> int:
        """How many elements there are."""
        return await self.tab.evaluate(f"document.querySelectorAll({selector!r}).length")

    async def set(self, setting: str, value: str) -> None:
        """Write into a field of the settings, which are open."""
        await self.tab.click(f"#setting-{setting}")
        await self.tab.type(value)

    async def messages(self) -> list[str]:
        """Texts of all questions and answers."""
        return await self.tab.evaluate(
            "[...document.querySelectorAll('.bubble, .prose')].map((node) => node.innerText)"
        )


@asynccontextmanager
async def using(app: web.Application, tab: browser.Tab, path: str = "/") -> AsyncIterator[User]:
    """A user at the page of an application."""
    async with TestServer(app) as server:
        yield User(tab, str(server.make_url(path)))


@dataclass
class GatedEngine(FakeEngine):
    """Gives out as many tokens as a test allows."""

    gate: asyncio.Semaphore | None = None

    async def script(self, prompt, params):
        async for delta in super().script(prompt, params):
            if self.gate is not None:
                await self.gate.acquire()
            yield delta


async def idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(browser.DEADLINE):
        while engine.num_requests:
            await asyncio.sleep(0.01)
