"""Links between routers and engines: node secrets, roles, and peers that break the protocol."""

import asyncio
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from gllm.engine.attachment.attachment import RouterAttachment
from gllm.engine.attachment.router_session import RouterSession
from gllm.messages import codec
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, encode
from gllm.messages.fleet import EngineReport, GreetEngine, RouterHeartbeat
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.connection_pool import ConnectionPool, FleetLinkConfig, PeerConnection
from gllm.runtime.messaging.security import add_secret, create_secret_file, drop_secret
from gllm.runtime.messaging.session import SessionError, SessionReceiver, SessionSender
from gllm.scheduler.plan import SchedulerStats, StepOutput
from tests.support.engines.fake_driver import text_of
from tests.support.examples import num_examples
from tests.support.routing.links import FakeEngine, Links, announcement, request, until

HUB = "127.0.0.1:0"
TO_ROUTER = {
    "Hello",
    "AnnounceEngine",
    "EngineReport",
    "EngineOutputs",
    "KvCacheEvents",
    "CommandDone",
    "RefuseRouter",
    "KvPushStarted",
    "FirstChunkComputed",
}
TO_ENGINE = {
    "Hello",
    "GreetEngine",
    "RouterHeartbeat",
    "SubmitRequest",
    "RejectedRequest",
    "AbortSequences",
    "WatchKvCache",
    "DrainEngine",
    "SetEngineRole",
    "ResetPrefixCache",
    "NoticeToEngine",
    "RefuseEngine",
    "PrefetchKv",
    "ReleaseKvHolds",
    "RenewKvHolds",
    "HandOffSequence",
    "KeepComputedKv",
}


async def test_a_session_survives_the_first_step_of_a_rotation_and_its_requests_the_last(
    links: Links, tmp_path: Path
) -> None:
    at_router, at_engine = tmp_path / "router", tmp_path / "engine"
    create_secret_file(at_router)
    shutil.copy(at_router, at_engine)
    router = await links.router(hub=HUB, node_secret_file=str(at_router), reload_seconds=0.01)
    engine, _ = await links.engine(dial=(router.address,), node_secret_file=str(at_engine))
    await until(lambda: router.attached)
    prompt = next([n] for n in range(99) if len(text_of([n], 0, 9)) == 9)
    router.link().send(request(5, prompt, 9))
    await until(lambda: engine.driver.sequences)
    while len(router.tokens().get(5, [])) < 3:
        engine.step()
        await asyncio.sleep(0.001)
    add_secret(at_router)
    shutil.copy(at_router, at_engine)
    drop_secret(at_router)
    await until(lambda: router.lost and engine.client.num_requests == 0)
    # The engine's file has both secrets: it finds the one that the router uses now.
    await until(lambda: len(router.attached) == 2)
    given = router.tokens()[5]
    router.link().send(request(6, prompt, 9, outputs=[given.copy()]))
    await until(lambda: engine.driver.sequences)
    while engine.driver.sequences:
        engine.step()
    await until(lambda: 6 in router.ends())
    assert given + router.tokens()[6] == text_of(prompt, 0, 9)


@pytest.mark.parametrize("is_engine_dialling", [True, False])
async def test_no_session_without_the_secret(
    links: Links, tmp_path: Path, is_engine_dialling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files: dict[str, Any] = {"none": None}
    for name in ("right", "wrong"):
        create_secret_file(tmp_path / name)
        files[name] = str(tmp_path / name)
    router = await links.router(hub=HUB, node_secret_file=files["right"])
    _, attachment = await links.engine(hub=HUB, node_secret_file=files["right"])
    port = attachment.hub_address.rpartition(":")[2]
    for name in ("wrong", "none"):
        if is_engine_dialling:
            await links.engine(
                announcement(name), dial=(router.address,), node_secret_file=files[name]
            )
        else:
            await links.router(dial=(f"127.0.0.1:{port}",), node_secret_file=files[name])
    await until(lambda: caplog.text.count("no session with") == 2)
    assert "secret" in caplog.text
    assert router.attached == []
    assert attachment.routers == []


@pytest.mark.parametrize("address", ["10.0.0.1:29700", "[2001:db8::1]:29700", "router:29700"])
def test_nobody_dials_another_machine_without_a_secret(address: str, tmp_path: Path) -> None:
    create_secret_file(tmp_path / "secret")
    for secret in (None, str(tmp_path / "secret")):
        config = FleetLinkConfig(dial=(address,), node_secret_file=secret)
        if secret is None:
            with pytest.raises(ValueError, match=r"is not on this machine.*--new-secret"):
                RouterAttachment(FakeEngine(), announcement, config)
        else:
            RouterAttachment(FakeEngine(), announcement, config)


def tags_of(decode: Any) -> set[str]:
    """Names of the messages that a decoder accepts, all of AnyMessage tried."""
    accepted = set()
    for kind in msgspec.inspect.type_info(AnyMessage).types:  # type: ignore[attr-defined]
        try:
            decode(msgspec.msgpack.encode([kind.tag]))
            accepted.add(kind.tag)
        except msgspec.ValidationError as error:
            if "Invalid value" not in str(error):
                accepted.add(kind.tag)
    return accepted


def test_each_role_may_send_its_own_messages_only() -> None:
    assert tags_of(codec.decode_for_router) == TO_ROUTER
    assert tags_of(codec.decode_for_engine) == TO_ENGINE


@pytest.mark.parametrize(
    "field", ["block_size", "num_stages", "max_model_len", "vocab_size", "max_num_seqs"]
)
def test_an_engine_has_sizes_of_at_least_one(field: str) -> None:
    payload = encode(msgspec.structs.replace(announcement(), **{field: 0}))
    with pytest.raises(msgspec.ValidationError, match=">= 1"):
        codec.decode_for_router(payload)


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A message with some bytes replaced, inserted, removed or repeated."""
    data = bytearray(payload)
    for _ in range(rng.choice([1, 1, 2, 5])):
        position = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[position : position + 1] = rng.randbytes(1)
            case 1:
                data[position:position] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[position : position + rng.randrange(1, 9)]
            case 3:
                data[position:position] = data[position : position + rng.randrange(1, 99)]
    return bytes(data)


SAMPLES: dict[str, list[WireMessage]] = {
    "decode_for_router": [
        announcement(),
        EngineReport("ready", "", SchedulerStats()),
        EngineOutputs(StepOutput([1], [2], [], []), SchedulerStats()),
    ],
    "decode_for_engine": [
        GreetEngine(1, 1, "router", 7),
        RouterHeartbeat(),
        SubmitRequest(3, [1, 2], SequenceSamplingParams(0.5, seed=3), 5, [2], n=2),
    ],
}


@pytest.mark.parametrize("role", SAMPLES)
def test_mutated_messages_end_their_session_with_a_cause(role: str) -> None:
    """10^4 frames: each is a message, or a SessionError that says what is wrong."""
    seed = 5
    rng = random.Random(seed)
    causes = []
    for _ in range(10_000):
        message = rng.choice(SAMPLES[role])
        receiver = SessionReceiver(0, getattr(codec, role))
        (frame,) = SessionSender(0).frames(mutated(encode(message), rng), 0)
        try:
            receiver.receive(frame)
        except SessionError as error:
            causes.append(str(error))
    assert len(causes) > 5_000, f"seed {seed}"
    assert all(causes)


EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan")]


def odd_request(rng: random.Random) -> SubmitRequest:
    """A request that can be encoded and whose fields need not make sense."""
    n = rng.choice([1, 1, 2, 129]) if rng.random() < 0.99 else rng.choice([2**31, 2**62])
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": rng.choice(FLOATS)},
        {"top_k": rng.choice(EXTREMES)},
        {"seed": rng.choice(EXTREMES)},
    ]
    sampling = msgspec.structs.replace(SequenceSamplingParams(), **rng.choice(fields))
    return SubmitRequest(
        rng.choice([*EXTREMES, rng.randrange(1000)]),
        rng.choice([[], [1, 2], [2**31 - 1], [7] * 600]),
        sampling,
        rng.choice(EXTREMES),
        [],
        n=n,
        priority=rng.choice(EXTREMES),
        choices=rng.choice([[], [0], [0, 0], [1, 0], [2**31 - 2], list(range(129))]),
        outputs=rng.choice([[], [[]], [[1], [2]], [[3]] * 129]),
        age_seconds=abs(rng.choice(FLOATS)),
    )


async def test_thousands_of_odd_requests_are_answered() -> None:
    """Each request runs, is answered with an error, or ends its router's session."""
    seed = 9
    rng = random.Random(seed)
    engine = FakeEngine()
    sent: list[WireMessage] = []
    submitted: list[WireMessage] = []
    engine.client.detach("replaced")
    engine.client.attach(submitted.append)
    num_started = 0
    causes = []
    session: RouterSession | None = None
    for number in range(num_examples(1500, 10_000)):
        if session is None:
            connection = PeerConnection("test", sent.append, 0.0)
            session = RouterSession(connection, GreetEngine(1, 1, "router", 1), engine)
        payload = encode(odd_request(rng))
        sent.clear()
        submitted.clear()
        running = engine.client.num_requests
        try:
            message = codec.decode_for_engine(payload)
        except msgspec.DecodeError:
            continue
        try:
            session.on_message(message, "")
        except ValueError as error:
            causes.append(str(error))
            session.end()
            session = None
            continue
        is_started = engine.client.num_requests > running
        num_started += is_started
        assert is_started != bool(sent), f"seed {seed}, request {number}"
    if session is not None:
        session.end()
    assert engine.client.num_requests == 0
    assert num_started > 100
    assert len(causes) > 10
    assert all(causes)


@pytest.mark.parametrize(
    "message",
    [
        EngineOutputs(StepOutput([1], [2], [], []), SchedulerStats()),
        announcement(),
        EngineReport("ready", "", SchedulerStats()),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_router_may_not_send_an_engines_messages(
    links: Links, message: WireMessage
) -> None:
    router, engine, _ = await links.pair()
    router.link().send(request(5, [1, 2]))
    await until(lambda: engine.driver.sequences)
    router.link().send(message)
    await until(lambda: engine.client.num_requests == 0 and router.lost)
    # It dials again and is accepted.
    await until(lambda: len(router.attached) == 2)


def test_headers_of_frames_have_fixed_size() -> None:
    for length in range(struct.calcsize("<QIQI")):
        with pytest.raises(SessionError, match="has no header"):
            SessionReceiver(0, codec.decode_for_router).receive(bytes(length))


async def test_dialling_goes_on_after_an_error_of_a_socket(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    router = await links.router(hub=HUB)
    addresses = ["127.0.0.1:port", router.address]

    async def resolve(host: str, port: int) -> list[str]:
        """Return an address once for which ZeroMQ has no socket."""
        return [addresses.pop(0) if len(addresses) > 1 else addresses[0]]

    await links.engine(dial=(router.address,), resolve=resolve)
    await until(lambda: router.attached)
    assert "Invalid argument" in caplog.text


async def test_addresses_that_are_gone_leave_nothing_behind() -> None:
    name = [f"127.0.0.{number + 1}:1" for number in range(5)]

    async def resolve(host: str, port: int) -> list[str]:
        """Return the addresses of a name one after the other, or that of an address."""
        if host != "localhost":
            return [f"{host}:{port}"]
        return [name.pop(0) if len(name) > 1 else name[0]]

    config = FleetLinkConfig(dial=("dns:localhost:1",), resolve_seconds=0.01)
    handler: Any = SilentHandler()
    pool = ConnectionPool(config, codec.decode_for_engine, handler, resolve)
    await pool.start()
    try:
        await until(lambda: len(pool.dialed_addresses) > 1)
        await until(lambda: pool.dialed_addresses == ["127.0.0.5:1"])
        name.append("127.0.0.1:1")
        await until(lambda: "127.0.0.1:1" in pool.dialed_addresses)
    finally:
        await pool.stop()
    assert pool.dialed_addresses == []


class SilentHandler:
    """Owner of sessions that does nothing with them."""

    def on_connected(self, connection: PeerConnection) -> None:
        pass

    def on_lost(self, connection: PeerConnection, cause: str) -> None:
        pass

    def on_listener_gone(self, address: str) -> None:
        pass

    def on_tick(self) -> None:
        pass


def test_a_spoke_whose_address_is_none_leaves_no_socket() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        Spoke(context, 0, 1, "tcp://no address", codec.decode_for_engine)
    context.term()
