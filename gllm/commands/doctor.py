"""`gllm doctor`: find what keeps machines from forming an engine, and the command that mends it."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Iterator

from gllm.config.emulation import DEVICES, is_emulated
from gllm.config.node_environment import has_launcher, parse_head_address, read_node_rank
from gllm.config.nodes import DEFAULT_DATA_PORT, NodesConfig
from gllm.deploy.doctor import host_checks, model_checks, network_checks
from gllm.deploy.doctor.finding import Finding, Verdict, note
from gllm.deploy.doctor.head_probe import (
    HeadAnswer,
    check_answer,
    check_node_name,
    probe_head,
)
from gllm.deploy.doctor.model_checks import LocalModel
from gllm.messages.nodes import PROTOCOL
from gllm.options.flags import FlagParser, number_type
from gllm.options.version import __version__
from gllm.recovery.join_check import JoinFacts
from gllm.runtime.messaging.security import SecretFile, SecretFileError
from gllm.runtime.node.machine import MachineMonitor, is_own_address
from gllm.runtime.worker.device import available_memory_bytes


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm doctor`."""
    parser = FlagParser(prog="gllm doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--master-addr",
        metavar="HOST:PORT",
        help="address of the head, as in gllm.serve; default: from the launcher's environment, or "
        "checks of this machine only",
    )
    parser.add_argument("--node-secret-file", metavar="FILE", help="as in gllm.serve")
    parser.add_argument("--model", help="as in gllm.serve: is it here, and does it fit")
    parser.add_argument(
        "--device",
        default="auto",
        choices=DEVICES,
        metavar="DEVICE",
        help=f"as in gllm.serve: {', '.join(DEVICES)}; an emulated one needs no weights",
    )
    for flag, low, high, text in (
        ("--nnodes", 1, 1024, "machines of the engine"),
        ("--node-rank", 0, 1023, "rank of this machine"),
        ("--pp", 1, 1024, "pipeline stages"),
    ):
        parser.add_argument(flag, type=number_type(int, ge=low, le=high), help=text)
    parser.add_argument(
        "--data-port",
        type=number_type(int, ge=0, le=2**16 - 1),
        default=DEFAULT_DATA_PORT,
        help=f"as in gllm.serve (default {DEFAULT_DATA_PORT})",
    )
    parser.add_argument("--link-congestion", help="as in gllm.serve")
    parser.add_argument(
        "--node-name",
        default=socket.gethostname(),
        help="as in gllm.serve: has another machine this name (default: the host name)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Check whether this machine can be part of a multi-node engine; print each result.

    Returns:
        The exit status: 1 if a problem prevents an engine from running, else 0.
    """
    values = make_parser().parse_args(argv)
    nodes = NodesConfig(
        nnodes=values.nnodes or 1, node_rank=values.node_rank, master_addr=values.master_addr
    )
    num_problems = 0
    for finding in run_checks(values, nodes):
        print(finding, flush=True)
        num_problems += finding.verdict == Verdict.BAD
    if num_problems:
        print(f"\ngllm doctor: {num_problems} problem(s)", file=sys.stderr)
        return 1
    print("\nnothing keeps this machine from joining")
    return 0


def run_checks(values: argparse.Namespace, nodes: NodesConfig) -> Iterator[Finding]:
    """Yield the results of all checks: of this machine, then of the network and the head node.

    Args:
        values: parsed flags of `gllm doctor`.
        nodes: number of nodes, rank and head address of the same flags.
    """
    gpus = MachineMonitor().gpu_names
    yield host_checks.check_platform()
    yield host_checks.check_descriptors()
    yield host_checks.check_shared_memory(len(gpus))
    model = None
    if values.model is not None:
        finding, model = model_checks.check_model(values.model, values.device)
        yield finding
    secret = host_checks.check_secret(values.node_secret_file)
    congestion = host_checks.check_congestion_control(values.link_congestion)
    yield from filter(None, (secret, congestion))
    try:
        place = read_node_rank(nodes, os.environ)
        head, num_nodes = (place.host, place.port), place.num_nodes
    except ValueError:
        head, num_nodes = _given_head(nodes), nodes.nnodes
    if values.node_rank is not None or has_launcher(os.environ):
        yield host_checks.check_launcher(nodes, values.pp, os.environ)
    if model is not None and not is_emulated(values.device):
        memory = available_memory_bytes()
        yield model_checks.check_memory(model, num_nodes, memory, bool(gpus))
    if head[0] or (num_nodes or 1) > 1:
        yield from filter(None, [host_checks.check_slow_start(values.link_congestion)])
    if not head[0]:
        yield note("head", "not checked: pass --master-addr HOST:PORT")
        return
    yield from _check_head(*head, values, model)


def _given_head(nodes: NodesConfig) -> tuple[str, int]:
    """Return the address in the flags; an empty host if there is none or an invalid one."""
    try:
        return parse_head_address(nodes.master_addr or "")
    except ValueError:
        return "", 0


def _check_head(
    host: str, port: int, values: argparse.Namespace, model: LocalModel | None
) -> Iterator[Finding]:
    """Yield what keeps this machine from the head; a failure ends the checks that need it."""
    finding, address = network_checks.check_host_name(host, port)
    yield finding
    if not address:
        return
    finding, own_address = network_checks.check_route(address, port)
    yield finding
    if not own_address:
        return
    yield network_checks.check_data_port(own_address, values.data_port)
    needs_secret = network_checks.check_secret_is_needed(
        address, values.node_secret_file is not None
    )
    if needs_secret is not None:
        yield needs_secret
    try:
        path = values.node_secret_file
        keys = None if path is None else SecretFile(path).keys[0]
    except SecretFileError:
        # It has a finding of its own.
        yield network_checks.check_head_port(address, port)
        return
    # First, because the head counts connections without a session as refused.
    answer: HeadAnswer = asyncio.run(probe_head(address, port, keys))
    if answer.facts is None:
        finding = network_checks.check_head_port(address, port)
        yield finding
        if finding.verdict == Verdict.BAD:
            return
    own = JoinFacts(
        PROTOCOL,
        __version__,
        "" if model is None else model.name,
        "" if model is None else model.digest,
        b"",
    )
    yield from check_answer(answer, own, path)
    is_head = is_own_address(address)
    yield from filter(None, [check_node_name(answer, values.node_name, is_head)])
    if values.data_port:
        yield network_checks.check_data_port_of_head(address, values.data_port)
