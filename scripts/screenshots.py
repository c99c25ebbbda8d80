"""Pictures of the chat page for docs/: `python -m scripts.screenshots [URL]`, beside `make serve`.

Owns what the pictures show. Knows nothing of the page's insides beyond what is clicked. Type is
that of the machine it runs on; those of docs/ had Inter (apt-get install fonts-inter).
"""

import asyncio
import sys
from pathlib import Path

from scripts import browser

FOLDER = Path(__file__).parent.parent / "docs" / "images"
URL = "http://127.0.0.1:8000/"
SETTLE = 0.5
"""Seconds until nothing on the page moves any more."""
EARLIER = (
    ("Where does the owl live?",),
    ("What is the opposite of big?", "And of cold?"),
)
SHOWN = ("Hello! Who are you?", "Tell me a story about Otto the fox.")
DESKTOP, PHONE = (1200, 760), (390, 780)


async def say(tab: browser.Tab, text: str) -> None:
    """Send a message and wait for the answer's end."""
    await tab.click("#input")
    await tab.type(text)
    await tab.click("#send")
    await tab.until("document.querySelector('.message:last-child.assistant:not(.growing)')")


async def take(address: str, url: str) -> None:
    """All pictures, of one browser's tab."""
    async with browser.opened(address) as tab:
        await tab.size(*DESKTOP)
        await tab.go(url)
        await tab.until("document.querySelector('#state').dataset.state == 'ready'")
        for conversation in (*EARLIER, SHOWN):
            await tab.click("#new-chat")
            for text in conversation:
                await say(tab, text)
        for name, scheme, size, scale in (
            ("light", "light", DESKTOP, 1.5),
            ("dark", "dark", DESKTOP, 1.5),
            ("phone", "light", PHONE, 2.0),
        ):
            await tab.size(*size, scale, phone=size == PHONE)
            await tab.prefer(scheme)
            await tab.evaluate("document.activeElement.blur()")
            await tab.evaluate("document.querySelector('#scroller').scrollTo(0, 1e6)")
            await asyncio.sleep(SETTLE)
            await tab.picture(FOLDER / f"chat-{name}.png")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with browser.running() as found:
        asyncio.run(take(found, (sys.argv[1:] or [URL])[0]))
