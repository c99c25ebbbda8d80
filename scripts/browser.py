"""A headless Chromium, driven over its DevTools protocol.

Owns the process, its tabs, and a user's hands: clicks, keys, text. Knows nothing of the pages that
it shows.

Source: https://chromedevtools.github.io/devtools-protocol/ (domains Target, Page, Runtime, Input,
Emulation, Network, Log).
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
DEADLINE = 60.0
"""Seconds for anything that should happen at once, on a machine however busy."""
KEYS = {"Enter": 13, "Escape": 27}
MAX_MESSAGE = 2**26
"""Bytes of a protocol message: screenshots are large."""


class BrowserError(Exception):
    """The browser, or the page in it, did not do as it was told."""


def installed() -> str | None:
    """Path of a Chromium on this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def running() -> Iterator[str]:
    """Return the DevTools address of a browser of its own. Raises BrowserError."""
    if (program := installed()) is None:
        raise BrowserError("there is no Chromium: make browser")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # A session of its own: its helpers end with it.
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _address(process, Path(profile) / "DevToolsActivePort")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address(process: "subprocess.Popen[bytes]", file: Path) -> str:
    """Return the browser writes its port and path once it listens."""
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < DEADLINE:
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise BrowserError(f"Chromium did not start (status {process.poll()})")


@asynccontextmanager
async def opened(address: str) -> AsyncIterator["Tab"]:
    """Return an empty tab, with a storage of its own, of a browser at a DevTools address."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=MAX_MESSAGE) as socket,
    ):
        tab = Tab(socket)
        reader = asyncio.create_task(tab.read())
        try:
            await tab.open()
            yield tab
        finally:
            await tab.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


class Tab:
    """A page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session: str | None = None
        self._context = ""
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._navigated = asyncio.Event()
        self.errors: list[str] = []
        """Exceptions and messages of warning that the page brought about."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""

    async def open(self) -> None:
        """Make the tab."""
        made = await self.call("Target.createBrowserContext")
        self._context = made["browserContextId"]
        made = await self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        target = {"targetId": made["targetId"], "flatten": True}
        self._session = (await self.call("Target.attachToTarget", **target))["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        """End the tab and its storage."""
        self._session = None
        await self.call("Target.disposeBrowserContext", browserContextId=self._context)

    async def read(self) -> None:
        """Take the browser's messages, until it is gone."""
        async for message in self._socket:
            told = json.loads(message.data)
            if future := self._waiting.pop(told.get("id"), None):
                if not future.done():
                    future.set_result(told)
            else:
                self._note(told.get("method"), told.get("params", {}))
        for future in self._waiting.values():
            future.cancel()

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        match method:
            case "Page.frameNavigated":
                self._navigated.set()
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", details["text"])
                self.errors.append(thrown)
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                said = (str(one.get("value", one.get("description"))) for one in params["args"])
                self.errors.append(" ".join(said))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises BrowserError."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        async with asyncio.timeout(DEADLINE):
            told = await self._waiting[number]
        if "error" in told:
            raise BrowserError(f"{method}: {told['error']['message']}")
        return told["result"]

    async def go(self, url: str) -> None:
        """Load a page to its end. Raises BrowserError."""
        told = await self.call("Page.navigate", url=url)
        if "errorText" in told:
            raise BrowserError(f"{url}: {told['errorText']}")
        await self.until(f"location.href == {url!r} && document.readyState == 'complete'")

    async def reload(self) -> None:
        """Load the page again, to its end. Raises BrowserError."""
        self._navigated.clear()
        await self.call("Page.reload")
        async with asyncio.timeout(DEADLINE):
            await self._navigated.wait()
        await self.until("document.readyState == 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return a JavaScript expression's value, awaited if it is a promise.

        Raises:
            BrowserError: The expression throws.
        """
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            thrown = told["exceptionDetails"].get("exception", {}).get("description")
            raise BrowserError(f"{expression}: {thrown}")
        return told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; its value, true for a node. Raises BrowserError."""
        begin = time.monotonic()
        plain = f"((value) => (value instanceof Node ? true : value))({expression})"
        while not (value := await self.evaluate(plain)):
            if time.monotonic() - begin > DEADLINE:
                raise BrowserError(f"never came true: {expression}")
            await asyncio.sleep(0.02)
        return value

    async def click(self, selector: str) -> None:
        """Press the mouse on an element, seen there and at rest. Raises BrowserError."""
        x, y = await self.until(f"""(() => {{
            const node = document.querySelector({selector!r});
            if (!node) return null;
            node.scrollIntoView({{ block: "nearest", behavior: "instant" }});
            const moves = ({{ playState, effect }}) =>
                playState == "running" && effect.getComputedTiming().endTime < Infinity
                && effect.target.contains(node);
            if (document.getAnimations().some(moves)) return null;
            const box = node.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            return node.contains(document.elementFromPoint(x, y)) ? [x, y] : null;
        }})()""")
        mouse = {"x": x, "y": y, "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse)

    async def scroll(self, selector: str, pixels: float) -> None:
        """Turn the mouse wheel over an element, down where the number is positive."""
        x, y = await self.evaluate(f"""(() => {{
            const box = document.querySelector({selector!r}).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        wheel = {"x": x, "y": y, "deltaX": 0, "deltaY": pixels}
        await self.call("Input.dispatchMouseEvent", type="mouseWheel", **wheel)

    async def type(self, text: str) -> None:
        """Write a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, shift: bool = False) -> None:
        """Press a key of KEYS and let go."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        more = {**code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **more, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    async def choose(self, selector: str, *files: Path) -> None:
        """Choose files in a file input, as its dialog does. Raises BrowserError."""
        document = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = await self.call("DOM.querySelector", nodeId=document, selector=selector)
        names = [str(file) for file in files]
        await self.call("DOM.setFileInputFiles", files=names, nodeId=node["nodeId"])

    async def size(self, width: int, height: int, scale: float = 1, phone: bool = False) -> None:
        """Return the page's width and height in CSS pixels; a phone has a touch screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    async def prefer(self, scheme: str) -> None:
        """Return the system's appearance: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        """Return a screenshot of the visible page as PNG bytes."""
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))
