"""Hand-offs that routers of other projects direct: two servers, each around a fake engine."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gllm.config.server import ServerConfig
from gllm.engine.interface import KvParticipant
from gllm.frontend.handoffs.access import ControlAccess, parse_networks
from gllm.frontend.handoffs.grant import (
    VERSION,
    GrantError,
    GrantSealer,
    HeldPrompt,
    KvGrant,
    digest_tokens,
)
from gllm.frontend.handoffs.rooms import RoomTable
from gllm.messages.handoff import KvHandoff
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Answer, Server, serving
from tests.support.http.fake_engine import FakeEngine

KEY = "control-key-of-the-fleet"
ROUTER = {"X-Control-Key": KEY}
GENERATE_PATH = "/inference/v1/generate"
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that the proxy of vLLM's NixlConnector tests sends to the prefill engine."""
TOKENS: dict[str, Any] = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 6}}
BODIES = {CHAT_PATH: {**CHAT, "max_tokens": 6}, TEXT_PATH: {**TEXT, "max_tokens": 6}}
BODIES[GENERATE_PATH] = TOKENS


@dataclass
class Pair:
    """Servers of both engines."""

    prefill: Server
    decode: Server

    async def send(self, server: Server, path: str, **fields: object) -> Answer:
        return await server.post(path, {**BODIES[path], **fields}, headers=ROUTER)

    async def prefill_nixl(self, path: str, **fields: object) -> dict[str, Any]:
        """The `kv_transfer_params` for the decode engine."""
        answer = await self.send(self.prefill, path, kv_transfer_params=PREFILL_PARAMS, **fields)
        assert answer.status == 200, answer.json
        params: dict[str, Any] = answer.json["kv_transfer_params"]
        return params

    def bootstrap(self, room: int = 77) -> dict[str, object]:
        """The fields that a router of SGLang sends to both engines."""
        port = self.prefill.client.port
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}


def participant(name: str, role: str) -> KvParticipant:
    run = {"p": 11, "d": 22}[name]
    return KvParticipant(name, run, role, "numerics", b"endpoint of " + name.encode())


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "control-keys"
    path.write_text(f"# of the fleet\n{KEY}\n")
    return str(path)


@pytest.fixture
async def pair(tokenizer: Tokenizer, key_file: str) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        servers = []
        for name, role in (("p", "prefill"), ("d", "decode")):
            engine = FakeEngine(tokenizer, participant=participant(name, role))
            options: dict[str, Any] = {"control_key_file": key_file}
            if name == "d":
                options["control_network"] = ("127.0.0.0/8",)
            servers.append(await stack.enter_async_context(serving(engine, **options)))
        yield Pair(*servers)


async def counted(server: Server) -> dict[str, int]:
    """Counts of the outcomes of a half that have occurred."""
    async with server.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith("gllm:http_handoffs_total"):
            labels, _, value = line.rpartition(" ")
            found["/".join(re.findall(r'(?:half|outcome)="(\w+)"', labels))] = int(float(value))
    return {name: value for name, value in found.items() if value}


def handoffs(server: Server) -> list[KvHandoff | None]:
    return [call.handoff for call in server.engine.calls]


@pytest.mark.parametrize("path", BODIES)
async def test_the_prefill_half_of_a_request_with_min_tokens_is_accepted(
    pair: Pair, path: str
) -> None:
    """A router of vLLM sets max_tokens to 1 and leaves the rest of the client's request."""

    def limits(max_tokens: int) -> dict[str, Any]:
        values = {"max_tokens": max_tokens, "min_tokens": 3}
        return {"sampling_params": values} if path == GENERATE_PATH else values

    params = await pair.prefill_nixl(path, **limits(1))
    (call,) = pair.prefill.engine.calls
    assert (call.params.max_tokens, call.params.min_tokens) == (1, 1)
    answer = await pair.send(pair.decode, path, kv_transfer_params=params, **limits(6))
    assert answer.status == 200
    (call,) = pair.decode.engine.calls
    assert (call.params.max_tokens, call.params.min_tokens) == (6, 3)
    ordinary = await pair.send(pair.decode, path, **limits(1))
    assert ordinary.status == 400, "it contradicts itself"


@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_of_the_prefill_engine_lets_the_other_one_fetch(
    pair: Pair, path: str
) -> None:
    params = await pair.prefill_nixl(path)
    (call,) = pair.prefill.engine.calls
    assert call.handoff is not None
    assert call.handoff.ticket > 0
    assert call.handoff.is_ticket_foreign
    assert (call.params.n, call.params.max_tokens) == (1, 1)
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    answer = await pair.send(pair.decode, path, kv_transfer_params=params)
    assert answer.status == 200
    assert answer.json.get("kv_transfer_params") is None
    (other,) = pair.decode.engine.calls
    assert other.handoff is not None
    assert other.handoff.source is not None
    source = other.handoff.source
    assert (source.engine, source.run, source.endpoint) == ("p", 11, b"endpoint of p")
    assert (source.ticket, source.num_tokens) == (call.handoff.ticket, len(call.prompt))
    assert source.is_foreign
    assert other.handoff.num_cached_tokens == pair.prefill.engine.cached_tokens > 0
    assert await counted(pair.prefill) == {"prefill/held": 1}
    assert await counted(pair.decode) == {"decode/granted": 1}
    assert not other.handoff.ticket
    assert other.params.max_tokens == 6


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_both_halves_may_stream(pair: Pair, path: str) -> None:
    pair.prefill.client.session.headers.update(ROUTER)
    pair.decode.client.session.headers.update(ROUTER)
    events = await pair.prefill.stream(path, kv_transfer_params=PREFILL_PARAMS)
    params = events[-1]["kv_transfer_params"]
    events = await pair.decode.stream(path, kv_transfer_params=params, n=2)
    assert all("kv_transfer_params" not in event for event in events)
    (call,) = pair.decode.engine.calls
    assert call.handoff is not None
    assert call.handoff.source is not None
    assert call.params.n == 2


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("stream", [False, True])
async def test_bootstrap_fields_are_sent_to_both_engines_at_once(
    pair: Pair, path: str, stream: bool
) -> None:
    pair.prefill.engine.delay = 0.05
    bodies = {**BODIES[path], **pair.bootstrap(), "stream": stream}
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(_read(server, path, bodies)) for server in (pair.decode, pair.prefill)
        ]
    assert all(answer.result() == 200 for answer in answers)
    (first,), (second,) = pair.prefill.engine.calls, pair.decode.engine.calls
    assert first.handoff is not None
    assert first.params.max_tokens == 1
    assert second.handoff is not None
    assert second.handoff.source is not None
    assert second.handoff.source.ticket == first.handoff.ticket


async def _read(server: Server, path: str, body: dict[str, object]) -> int:
    async with server.client.post(path, json=body, headers=ROUTER) as response:
        await response.read()
        return response.status


async def test_several_prompts_are_handed_off_at_once(pair: Pair) -> None:
    fields = {"prompt": ["one", "two more"], "max_tokens": 3}
    params = await pair.prefill_nixl(TEXT_PATH, **fields)
    await pair.send(pair.decode, TEXT_PATH, kv_transfer_params=params, **fields)
    tickets = [each.ticket for each in handoffs(pair.prefill) if each is not None]
    sources = [each.source for each in handoffs(pair.decode) if each is not None]
    assert len(set(tickets)) == 2
    assert [source and source.ticket for source in sources] == tickets


async def test_a_prompt_that_ends_with_token_1_is_not_held(pair: Pair) -> None:
    pair.prefill.engine.reply = "H"
    params = await pair.prefill_nixl(TEXT_PATH, stop=["H"])
    assert params is None


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "another prompt"},
        {"prompt": ["Hi", "Hi"]},
        {"prompt_logprobs": 1},
    ],
)
async def test_blocks_that_do_not_fit_are_an_ordinary_prefill(
    pair: Pair, change: dict[str, object]
) -> None:
    params = await pair.prefill_nixl(TEXT_PATH)
    answer = await pair.send(pair.decode, TEXT_PATH, kv_transfer_params=params, **change)
    assert answer.status == 200
    assert set(handoffs(pair.decode)) == {None}


@pytest.mark.parametrize(
    "change",
    [{"digest": "other"}, {"endpoint": b""}, {"run": 11}],
    ids=["digest", "recovering", "itself"],
)
async def test_engines_that_do_not_fit_are_an_ordinary_prefill(
    pair: Pair, change: dict[str, Any]
) -> None:
    params = await pair.prefill_nixl(TEXT_PATH)
    engine = pair.decode.engine
    assert engine.participant is not None
    engine.participant = replace(engine.participant, **change)
    answer = await pair.send(pair.decode, TEXT_PATH, kv_transfer_params=params)
    assert answer.status == 200
    assert handoffs(pair.decode) == [None]
    assert len(engine.released) == ("run" in change)


async def test_a_grant_that_was_changed_is_an_ordinary_prefill(pair: Pair) -> None:
    params = await pair.prefill_nixl(TEXT_PATH)
    grant = params["remote_engine_id"]
    forged = GrantSealer(["another key"]).seal(GrantSealer([KEY]).unseal(grant))
    for text in (grant[:-4], "A" + grant[1:], forged, "", "no grant", "é"):
        changed = {**params, "remote_engine_id": text}
        answer = await pair.send(pair.decode, TEXT_PATH, kv_transfer_params=changed)
        assert answer.status == 200
    assert set(handoffs(pair.decode)) == {None}
    assert await counted(pair.decode) == {"decode/unfit_grant": 5, "decode/no_grant": 1}


async def test_a_prefill_engine_without_a_cache_answers_null(pair: Pair) -> None:
    engine = pair.prefill.engine
    engine.participant = replace(participant("p", "prefill"), endpoint=b"")
    assert await pair.prefill_nixl(TEXT_PATH) is None
    assert handoffs(pair.prefill) == [None]
    assert await counted(pair.prefill) == {"prefill/not_held": 1}


async def test_a_prefill_that_fails_lets_the_decode_engine_compute(pair: Pair) -> None:
    pair.prefill.engine.fail_after = 0
    body = {**BODIES[TEXT_PATH], **pair.bootstrap()}
    async with asyncio.TaskGroup() as group:
        failed = group.create_task(_read(pair.prefill, TEXT_PATH, body))
        decoded = group.create_task(_read(pair.decode, TEXT_PATH, body))
    assert (failed.result(), decoded.result()) == (500, 200)
    assert handoffs(pair.decode) == [None]


async def test_a_client_that_leaves_releases_the_tickets_of_all_prompts(pair: Pair) -> None:
    """The engine may end a prompt before it knows of its abort."""
    engine = pair.prefill.engine
    engine.delay = 60.0
    body = {**BODIES[TEXT_PATH], "prompt": ["ab", "cd"], "kv_transfer_params": PREFILL_PARAMS}
    task = asyncio.create_task(_read(pair.prefill, TEXT_PATH, body))
    async with asyncio.timeout(5):
        while len(engine.calls) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        while not engine.released:
            await asyncio.sleep(0.001)
    assert engine.released == [call.handoff.ticket for call in engine.calls if call.handoff]
    assert len(engine.released) == 2


async def test_an_unreachable_prefill_engine_is_an_ordinary_prefill(pair: Pair) -> None:
    async with serving(pair.prefill.engine) as stranger:
        port = stranger.client.port
    # The port is closed now.
    fields = {**pair.bootstrap(), "bootstrap_port": port}
    assert (await pair.send(pair.decode, TEXT_PATH, **fields)).status == 200
    async with serving(pair.prefill.engine) as stranger:
        # It has no control key, so it knows no rooms.
        fields["bootstrap_port"] = stranger.client.port
        assert (await pair.send(pair.decode, TEXT_PATH, **fields)).status == 200
    assert handoffs(pair.decode) == [None, None]
    assert await counted(pair.decode) == {"decode/no_grant": 2}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((path, "kv_transfer_params") for path in BODIES),
        (CHAT_PATH, "bootstrap_room"),
        (TEXT_PATH, "bootstrap_room"),
    ],
)
async def test_ordinary_clients_are_refused(pair: Pair, path: str, name: str) -> None:
    value = PREFILL_PARAMS if name == "kv_transfer_params" else 1
    for stream in (False, True):
        body = {**BODIES[path], name: value, "stream": stream}
        for headers in ({}, {"X-Control-Key": "guess"}, {"Authorization": "Bearer guess"}):
            answer = await pair.prefill.post(path, body, headers=headers)
            assert answer.status == 400
            assert (answer.error["param"], answer.error["code"]) == (name, "handoff_refused")
            assert "--control-key-file" in answer.error["message"]
    assert not pair.prefill.engine.calls


async def test_keys_of_other_routers_and_addresses_are_accepted(pair: Pair) -> None:
    body = {**BODIES[TEXT_PATH], "kv_transfer_params": PREFILL_PARAMS}
    headers = {"Authorization": f"Bearer {KEY}"}
    assert (await pair.prefill.post(TEXT_PATH, body, headers=headers)).status == 200
    # The decode engine has a control network.
    assert (await pair.decode.post(TEXT_PATH, body)).status == 200


async def test_engines_without_the_flags_refuse(tokenizer: Tokenizer, key_file: str) -> None:
    body = {**TEXT, "kv_transfer_params": PREFILL_PARAMS}
    async with serving(FakeEngine(tokenizer, participant=participant("p", "mixed"))) as server:
        answer = await server.post(TEXT_PATH, body, headers=ROUTER)
        assert answer.status == 400
        assert "--control-key-file" in answer.error["message"]
    async with serving(FakeEngine(tokenizer), control_key_file=key_file) as server:
        answer = await server.post(TEXT_PATH, body, headers=ROUTER)
        assert answer.status == 400
        assert "--kv-transfer" in answer.error["message"]
        assert (await server.complete(kv_transfer_params=None)).status == 200
        assert (await server.complete(kv_transfer_params={})).status == 200


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_transfer_params"),
        (
            {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
            "kv_transfer_params",
        ),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        ({"bootstrap_room": []}, "bootstrap_room"),
        ({"bootstrap_room": 1}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": "127.0.0.1"}, "bootstrap_port"),
        (
            {"bootstrap_room": 1, "bootstrap_host": "10.1.2.3", "bootstrap_port": 80},
            "bootstrap_host",
        ),
    ],
)
async def test_fields_that_make_no_sense_are_named(
    pair: Pair, fields: dict[str, object], name: str
) -> None:
    answer = await pair.send(pair.decode, TEXT_PATH, **fields)
    assert answer.status == 400
    assert answer.error["param"] == name


async def test_bootstrap_fields_need_a_role(pair: Pair) -> None:
    pair.prefill.engine.participant = participant("p", "mixed")
    answer = await pair.send(pair.prefill, TEXT_PATH, **pair.bootstrap())
    assert answer.status == 400
    assert "--role prefill" in answer.error["message"]


async def test_rooms_need_a_proof(pair: Pair) -> None:
    proof = GrantSealer([KEY]).prove(6)
    for room, shown in (("5", proof), ("5", KEY), ("x", proof), ("9" * 30, proof), ("5", "zz")):
        headers = {"X-Control-Proof": shown, **ROUTER}
        async with pair.prefill.client.get(f"/kv_handoffs/{room}", headers=headers) as response:
            assert response.status == 404


async def test_a_control_key_is_an_api_key(tokenizer: Tokenizer, key_file: str) -> None:
    engine = FakeEngine(tokenizer, participant=participant("p", "prefill"))
    async with serving(engine, control_key_file=key_file, api_key=("client",)) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {**TEXT, "kv_transfer_params": PREFILL_PARAMS}
        assert (await server.post(TEXT_PATH, body, headers=headers)).status == 200
        headers = {"Authorization": "Bearer client"}
        assert (await server.post(TEXT_PATH, body, headers=headers)).status == 400
        assert (await server.post(TEXT_PATH, TEXT, headers=headers)).status == 200


def test_grants_are_of_engines_with_the_same_key() -> None:
    held = HeldPrompt(2**63 - 1, 3, digest_tokens([1, 2, 3]))
    grant = KvGrant(VERSION, "p", 1, "numerics", b"\0\xff", [held, None])
    old, new = GrantSealer(["old"]), GrantSealer(["new", "old"])
    assert new.unseal(old.seal(grant)) == grant
    with pytest.raises(GrantError, match="control key"):
        old.unseal(new.seal(grant))
    with pytest.raises(GrantError, match="version"):
        new.unseal(new.seal(KvGrant(VERSION + 1, "p", 1, "", b"", [])))
    assert new.check_proof(7, old.prove(7))
    assert not new.check_proof(8, old.prove(7))


def test_control_networks_and_keys_are_checked(key_file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="control_key_file"):
        ServerConfig(control_network=("10.0.0.0/8",))
    with pytest.raises(ValueError, match=r"--control-network.*10\.0\.0\.0"):
        parse_networks(["10.0.0.1/8"])
    with pytest.raises(ValueError, match="--control-key-file"):
        ControlAccess(ServerConfig(control_key_file=str(tmp_path / "missing")))
    networks = ("10.0.0.0/8", "fd00::/8")
    access = ControlAccess(ServerConfig(control_key_file=key_file, control_network=networks))
    assert all(map(access.contains, ["10.9.8.7", "::ffff:10.0.0.1", "fd00::1%eth0"]))
    assert not any(map(access.contains, ["11.0.0.1", "::1", "localhost", ""]))


async def test_rooms_end_whoever_comes_first() -> None:
    rooms = RoomTable(open_seconds=0.01, grant_seconds=0.01, keep_seconds=0)
    assert await rooms.wait(1) == ""  # nobody opens it
    assert rooms.open(2)
    assert not rooms.open(2)
    assert await rooms.wait(2) == ""  # the prefill takes too long
    rooms.publish(2, "")
    assert rooms.open(3)
    rooms.publish(3, "grant")
    assert await rooms.wait(3) == "grant"
    assert rooms.open(4)
    rooms.publish(4, "nobody asks for it")
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert len(rooms) == 0
