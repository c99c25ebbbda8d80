"""Process of a machine that is not the head: the agent, its HTTP server and its signals.

Both `gllm.serve` with --node-rank 1 or more and `gllm node --join` run it. The agent is that of an
engine, or of a cluster if the peer is the master of one.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import setproctitle

from gllm.config.join import JoinConfig
from gllm.config.node_environment import parse_head_address
from gllm.config.nodes import BYTES_PER_MBIT, NodesConfig
from gllm.deploy.cluster.member import ClusterMember
from gllm.deploy.cluster.service_processes import ServiceMachine
from gllm.frontend.listening import raise_open_files_limit
from gllm.frontend.node_app import start_node_server
from gllm.observability.stop_signals import StopAction, StopSignals
from gllm.options.addresses import format_host_port, undialable_reason
from gllm.options.exit_status import UnavailableError
from gllm.runtime.emulation.model_folder import find_machine_model
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node import LocalNode
from gllm.runtime.messaging.security import (
    NodeCertificate,
    SecretFile,
    check_dialed_address,
    create_certificate,
)
from gllm.runtime.node.agent import Agent
from gllm.runtime.node.head_session import AgentConfig
from gllm.runtime.node.machine import MachineMonitor, find_own_address, read_facts
from gllm.runtime.node.membership import NodeMembership

log = logging.getLogger("gllm")

TITLE = "gllm-node"
RESOLVE_SECONDS = 2.0
"""Interval of attempts to resolve the head's name, which a cluster manager may create late."""


@dataclass(frozen=True)
class RankOptions:
    """Rank and configuration of a node with `--node-rank`, which the head compares."""

    rank: int
    num_workers: int
    """Workers to start before the head asks for them."""
    model_hash: str
    """Digest of the model."""
    engine_config: bytes
    """Engine configuration as JSON."""
    node_timeout: float
    """Seconds of silence after which a link is lost."""


class NodeProcess:
    """Runs the workers of a machine other than the head node, until a signal or release."""

    def __init__(self, head: str, config: JoinConfig, place: RankOptions | None = None) -> None:
        """Check the options and start the first workers.

        Args:
            head: HOST or HOST:PORT of the head, or of the master of a cluster.
            config: devices, ports and node secret of this machine.
            place: rank in the engine; None for a machine that joins without one.

        Raises:
            ValueError: an address or the secret cannot be used; the message says what to do.
        """
        self._config = config
        self._place = place
        host, port = parse_head_address(head)
        if reason := undialable_reason(host):
            raise ValueError(f"the head's address: {reason}")
        self._head = host, port
        secret = config.node_secret_file
        check_dialed_address(f"tcp://{format_host_port(host, port)}", secret is not None)
        if secret is not None:
            SecretFile(secret)
        if config.advertise:
            parse_head_address(config.advertise)
        self._name = config.node_name or socket.gethostname()
        self._should_stop = asyncio.Event()
        self._signals = StopSignals()
        self._agent: NodeMembership | None = None
        setproctitle.setproctitle(TITLE)
        self._node = LocalNode(place.num_workers if place else 0, node_name=self._name)

    async def run(self) -> int:
        """Run the agent; return the exit status of the process.

        Raises:
            ValueError: an address or a port cannot be used; the message names the flag.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        raise_open_files_limit()
        certificate = None
        try:
            address = await self._wait_for_own_address()
            if address is None:
                return 0
            if self._config.node_secret_file is not None:
                certificate = create_certificate()
            return await self._run_agent(address, certificate)
        finally:
            self._node.close()
            if certificate is not None:
                certificate.close()

    async def _run_agent(self, address: str, certificate: NodeCertificate | None) -> int:
        """Run the agent of an engine, or of a cluster; return the exit status."""
        options, place, (host, port) = self._config, self._place, self._head
        monitor = MachineMonitor()
        listen = format_host_port(address, options.data_port) if options.data_port else ""
        links = LinkProcess(
            self._name,
            listen,
            certificate,
            options.link_congestion,
            NodesConfig.node_timeout if place is None else place.node_timeout,
            options.link_policy,
            options.link_encoding,
            min_bytes_per_second=options.link_min_mbit_per_second * BYTES_PER_MBIT,
        )
        try:
            data_port = await self._listen(links) if listen else 0
            facts = read_facts(
                address,
                data_port,
                options.advertise or "",
                b"" if certificate is None else certificate.certificate,
                monitor.gpu_names if options.device in ("auto", "cuda") else [],
            )
            config = AgentConfig(
                head=format_host_port(host, port),
                name=self._name,
                rank=None if place is None else place.rank,
                is_spare=options.spare,
                model_hash="" if place is None else place.model_hash,
                engine_config=self._own_config() if place is None else place.engine_config,
                node_secret_file=options.node_secret_file,
                join_timeout=options.join_timeout,
            )
            find_model = partial(find_machine_model, own_model=options.model)
            agent = Agent(config, facts, self._node, links, find_model, monitor.read)
        except BaseException:
            links.close()
            raise
        try:
            status = await self._run_served(agent)
        finally:
            # Nothing, unless the agent has not run: its end closes them.
            links.close()
        if not agent.is_refused_by_master or place is not None or options.spare:
            return status
        log.info("%s is the master of a cluster: this node runs its services", config.head)
        # The processes of services take the data port.
        machine = ServiceMachine(self._name, facts.address, options)
        return await self._run_served(ClusterMember(config, facts, machine, monitor.read))

    def _own_config(self) -> bytes:
        """Return what may differ from the engine's configuration on this machine, as JSON."""
        own = ("device", "threads", "gpu_memory_utilization")
        return json.dumps({name: getattr(self._config, name) for name in own}).encode()

    async def _run_served(self, agent: NodeMembership) -> int:
        """Run an agent and the HTTP server of its probes; return the exit status."""
        self._agent = agent
        runner = await start_node_server(agent.status, self._config.host, self._config.port)
        own_host, own_port = runner.addresses[0][:2]
        log.info(
            "node %s joins %s; probes and metrics at http://%s",
            self._name,
            format_host_port(*self._head),
            format_host_port(str(own_host), int(own_port)),
        )
        if self._should_stop.is_set():
            agent.leave("a signal")
        try:
            return await agent.run()
        finally:
            await runner.cleanup()

    async def _listen(self, links: LinkProcess) -> int:
        try:
            return await links.listen()
        except OSError as error:
            raise UnavailableError(
                f"--data-port {self._config.data_port}: cannot listen there: "
                f"{error.strerror or error}; choose a free port, or 0 if no other machine reaches "
                "this one"
            ) from error

    async def _wait_for_own_address(self) -> str | None:
        """Return the own address towards the head once its name is known; None after a signal.

        Raises:
            ValueError: the name is still unknown, or there is no route, after the join timeout.
        """
        host, port = self._head
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.join_timeout
        has_warned = False
        while not self._should_stop.is_set():
            try:
                return await asyncio.to_thread(find_own_address, host, port)
            except OSError as error:
                cause = error.strerror or str(error)
                if loop.time() >= deadline:
                    raise ValueError(
                        f"the head {host} is not known here, or there is no route to it, for "
                        f"{self._config.join_timeout:g} s: {cause}; check the address with "
                        f"`gllm doctor --master-addr {format_host_port(host, port)}`"
                    ) from error
            if not has_warned:
                log.warning("the head %s cannot be resolved yet: %s; trying again", host, cause)
                has_warned = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._should_stop.wait(), RESOLVE_SECONDS)
        return None

    def _on_signal(self, number: int) -> None:
        action = self._signals.on_signal(number, asyncio.get_running_loop().time())
        if action is StopAction.KILL:
            # Workers die with their parent.
            os._exit(1)
        self._should_stop.set()
        if action is StopAction.DRAIN and self._agent is not None:
            self._agent.leave(f"it got {signal.Signals(number).name}")
