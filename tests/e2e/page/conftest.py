"""Fixtures of the chat page's tests: one browser for all, a tab and a scripted engine for each."""

from collections.abc import AsyncIterator, Iterator

import pytest

from gllm.frontend.app import make_app
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from scripts import browser
from tests.frontend.conftest import CONFIG
from tests.support.servers.page_user import GatedEngine, User, using
from tests.support.text import tokenizers as some


@pytest.fixture(scope="session")
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


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine(Tokenizer(some.byte_level(), ChatTemplate(some.CHATML, {})))


@pytest.fixture
async def user(engine: GatedEngine, tab: browser.Tab) -> AsyncIterator[User]:
    async with using(make_app(engine, CONFIG), tab) as made:
        await made.visit()
        yield made
        assert made.unexpected_errors() == []
