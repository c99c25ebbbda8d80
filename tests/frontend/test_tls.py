"""TLS: served, asked of clients, and files that do not do."""

import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.listening import tls_context
from tests.frontend.conftest import CHAT, CHAT_PATH
from tests.support.network.certificates import make_certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def files(folder) -> tuple[str, str]:
    return make_certificate(folder, "server")


@asynccontextmanager
async def secured(engine, config):
    """The URL of a server."""
    runner = ConnectionRunner(make_app(engine, config), config)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls_context(config)).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(url: str, trusted: str, shown: tuple[str, str] | None = None) -> int:
    """The status of a chat by a client that trusts and shows certificates."""
    context = ssl.create_default_context(cafile=trusted)
    if shown is not None:
        context.load_cert_chain(*shown)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT_PATH, json=CHAT, ssl=context) as response,
    ):
        await response.read()
        return response.status


async def test_https(engine, files):
    config = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])
    async with secured(engine, config) as url:
        assert await ask(url, files[0]) == 200
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(url + "/health"):
                pass
        with pytest.raises(aiohttp.ClientError):
            await ask(url.replace("https", "http"), files[0])
        assert await ask(url, files[0]) == 200


async def test_clients_show_certificates(engine, files, folder):
    known, stranger = make_certificate(folder, "known"), make_certificate(folder, "stranger")
    config = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1], ssl_ca_certs=known[0])
    async with secured(engine, config) as url:
        assert await ask(url, files[0], known) == 200
        for shown in (None, stranger):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await ask(url, files[0], shown)


def test_plain_http_needs_no_files():
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize("wrong", ["missing", "garbage", "mismatch", "encrypted", "authorities"])
def test_files_that_do_not_do(files, folder, wrong):
    garbage = folder / "garbage"
    garbage.write_text("no certificate")
    certificate, key = files
    authorities = None
    match wrong:
        case "missing":
            certificate, why = str(folder / "nowhere"), "No such file"
        case "garbage":
            certificate, why = str(garbage), "--ssl-certfile"
        case "mismatch":
            key, why = make_certificate(folder, "other")[1], "mismatch"
        case "encrypted":
            certificate, key = make_certificate(folder, "locked", "-passout", "pass:secret")
            why = "encrypted"
        case _:
            authorities, why = str(garbage), "--ssl-ca-certs"
    config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authorities)
    with pytest.raises(ValueError, match=why) as caught:
        tls_context(config)
    assert "--ssl-" in str(caught.value)
