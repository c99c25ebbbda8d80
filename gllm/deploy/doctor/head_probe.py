"""Question to a head for its version and model, without joining."""

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial

import zmq

from gllm.deploy.doctor.finding import Finding, bad, good
from gllm.messages.codec import AnyMessage, decode_for_agent
from gllm.messages.nodes import JoinCluster, NodeFacts, RefuseNode
from gllm.options.addresses import format_host_port
from gllm.recovery.join_check import (
    PROBE_PROTOCOL,
    JoinFacts,
    find_differences,
    parse_facts,
)
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.security import KeyPair

ANSWER_SECONDS = 10.0
"""Time for the handshake and the head's answer."""


@dataclass(frozen=True)
class HeadAnswer:
    """Version and model that a head node announces, or the reason why it did not answer."""

    facts: JoinFacts | None = None
    cause: str = ""
    """Reason for no answer, or a refusal that does not name version and model."""


async def probe_head(
    address: str, port: int, keys: KeyPair | None, seconds: float = ANSWER_SECONDS
) -> HeadAnswer:
    """Ask a head node for its version and model, without joining its engine.

    Args:
        address: IP address of the head.
        port: port at which the head accepts nodes.
        keys: key pair derived from the node secret; None without encryption.
        seconds: timeout of the answer.
    """
    answer: asyncio.Future[HeadAnswer] = asyncio.get_running_loop().create_future()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    try:
        target = f"tcp://{format_host_port(address, port)}"
        spoke = Spoke(context, 0, secrets.randbits(62), target, decode_for_agent, keys)
        spoke.start(partial(_on_messages, answer), partial(_on_lost, answer))
        spoke.send(
            JoinCluster(
                PROBE_PROTOCOL, "gllm-doctor", secrets.randbits(62), None, True, "", b"",
                NodeFacts("", "", "", "", 0, "", b"", [], 0, 0),
            )
        )  # fmt: skip
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            return HeadAnswer(cause=f"the head has not answered within {seconds:g} s")
        finally:
            spoke.close()
    finally:
        context.destroy(linger=0)


def _on_messages(answer: "asyncio.Future[HeadAnswer]", messages: list[AnyMessage]) -> None:
    for message in messages:
        if isinstance(message, RefuseNode) and not answer.done():
            facts = parse_facts(message.cause)
            answer.set_result(HeadAnswer(facts, "" if facts else message.cause))


def _on_lost(answer: "asyncio.Future[HeadAnswer]", cause: str) -> None:
    if not answer.done():
        answer.set_result(HeadAnswer(cause=cause))


def check_answer(answer: HeadAnswer, own: JoinFacts, secret_file: str | None) -> list[Finding]:
    """Compare gllm version, model and shared secret of a head node with those of this machine.

    Args:
        answer: response of the head to `probe_head`.
        own: version and model of this machine; an empty model hash is not compared.
        secret_file: path of the secret file that all nodes share; None without one.
    """
    if answer.facts is None:
        return [_explain_silence(answer.cause, secret_file)]
    secret = "encrypted with the node secret" if secret_file else "without a node secret"
    model = answer.facts.model
    what = f"it serves {model!r}" if model else "it is the master of a cluster"
    text = f"the head answers, {secret}; {what}"
    findings = [good("session with the head", text)]
    for sentence in find_differences(answer.facts, own):
        text, _, fix = sentence.rpartition(": ")
        findings.append(bad("same software and model", text, fix))
    if len(findings) == 1:
        compared = "version and model are" if own.model_hash and model else "the version is"
        findings.append(good("same software and model", f"{compared} the same as on the head"))
    return findings


def check_node_name(answer: HeadAnswer, name: str, is_head: bool) -> Finding | None:
    """Check that no other machine has joined the head with a name.

    Args:
        answer: response of the head to `probe_head`; without facts None is returned.
        name: name of this machine.
        is_head: True if the head is on this machine, whose name it may be.
    """
    if answer.facts is None or is_head:
        return None
    topic = "node name"
    if name not in answer.facts.nodes:
        return good(topic, f"no other machine is called {name}")
    return bad(
        topic,
        f"a machine called {name} has joined already",
        "pass --node-name with a name of its own to each machine; if the agent of this machine "
        "runs, it is that one, and nothing is wrong",
    )


def _explain_silence(cause: str, secret_file: str | None) -> Finding:
    if "secret" in cause and secret_file is None:
        fix = (
            "copy the head's secret file here and pass --node-secret-file FILE; or, if the head "
            "has none, correct the port, which is that of --master-addr, not of the API"
        )
    elif "secret" in cause:
        fix = (
            f"compare `sha256sum {secret_file}` here with that of the head's --node-secret-file, "
            f"and copy it: scp HEAD:FILE {secret_file}"
        )
    else:
        fix = (
            "check that the port is that of --master-addr (not of the API), that the head has "
            "--node-secret-file if this machine has it, and that both run the same version of gllm"
        )
    return bad("session with the head", cause, fix)
