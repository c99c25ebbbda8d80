"""Compressed request bodies, and those that say so and are not."""

import gzip
import json
import logging
import zlib

import pytest

from tests.frontend.conftest import TEXT, TEXT_PATH

BODY = json.dumps(TEXT).encode()
GOOD = {"gzip": gzip.compress(BODY, mtime=0), "deflate": zlib.compress(BODY)}


@pytest.mark.parametrize("encoding", GOOD)
async def test_compressed_bodies(server, encoding):
    headers = {"Content-Encoding": encoding}
    assert (await server.post(TEXT_PATH, GOOD[encoding], headers=headers)).status == 200


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", b"nonsense"),
        ("gzip", b"nonsense" * 20_000),
        ("gzip", GOOD["gzip"][:12] + b"\xff" * 30),
        ("gzip", GOOD["gzip"][:10]),
        ("deflate", b"nonsense"),
    ],
)
async def test_bodies_that_are_not_what_they_say(server, encoding, data, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        answer = await server.post(TEXT_PATH, data, headers={"Content-Encoding": encoding})
        assert answer.status == 400
        assert "\n" not in answer.error["message"]
    assert not [record for record in caplog.records if record.exc_info]
    assert (await server.complete()).status == 200
