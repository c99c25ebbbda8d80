"""The embeddable asyncio engine: a pipeline of worker processes, and text around it.

Imports no torch: the worker processes compute.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.engine.attachment.attachment import EngineAnnouncer, attach_to_routers
from gllm.engine.interface import KvParticipant
from gllm.engine.pipeline import PipelineBackend
from gllm.engine.preflight import plan_model, resolve_config
from gllm.engine.text_engine import TextEngine
from gllm.messages.handoff import MAX_TICKETS, ReleaseKvHolds
from gllm.messages.node_report import NodeReport
from gllm.models.hub import public_name, resolve_tokenizer
from gllm.models.split import layer_costs
from gllm.observability.logs import DEFAULT_LOG_CONFIG, LogConfig
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.node import Node
from gllm.runtime.head.supervisor import EngineError as EngineError


class Engine(TextEngine):
    """Asyncio interface to one model served by a pipeline of worker processes.

    Use it as `async with Engine(EngineConfig("demo")) as engine: ...`, or call `start` and `stop`.

    Args:
        config: Model, stages, memory and scheduler.
        served_model_name: Public name of the model; by default the name of its folder or
            repository, beside which requests may name `config.model` itself.
        logs: Level and format of the workers' logs.
        progress: Show a progress bar while the weights load.
        node: Node with worker processes that were started before; by default `start` creates it.
        attachment: Routers whose requests the engine runs too, by default none; and the node secret
            that these, and the machines of the engine, share.
        nodes: Machines of the engine, of which this one is the head; by default this one alone. The
            others run `python -m gllm.serve` with another `--node-rank`, or `gllm node --join`.
        create_backend: Creates the pipeline that runs the requests.
        max_num_queued_requests: Requests above which those of routers go elsewhere; None for no
            limit. The HTTP server limits its own.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model or the network.
    """

    _client: EngineClient

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str | None = None,
        logs: LogConfig = DEFAULT_LOG_CONFIG,
        progress: bool = False,
        node: Node | None = None,
        attachment: AttachmentConfig | None = None,
        nodes: NodesConfig | None = None,
        create_backend: Callable[..., PipelineBackend] = PipelineBackend,
        max_num_queued_requests: int | None = None,
    ) -> None:
        plan = plan_model(config)
        self.config = resolve_config(config, plan)
        planner = LayerPlanner(self.config, plan.layers, layer_costs(plan.config.model))
        secret_file = None if attachment is None else attachment.node_secret_file
        backend = create_backend(
            self.config, plan.folder, planner, logs, progress, node, nodes, secret_file
        )
        self._supervisor = backend.supervisor
        self._pipeline = backend
        super().__init__(
            backend,
            served_model_name or public_name(config.model),
            resolve_tokenizer(config.tokenizer, plan.folder),
            plan.config,
            plan.max_model_len,
            config.chat_template,
            config.seed,
        )
        self.model = replace(self.model, root=config.model, has_alias=served_model_name is None)
        self._folder = plan.folder
        self._attachment_config = attachment or AttachmentConfig()
        if self._attachment_config.is_used:
            backend.attachment = attach_to_routers(
                backend.supervisor,
                self._announce,
                self._attachment_config,
                max_num_queued_requests,
            )

    def nodes(self) -> list[NodeReport]:
        """Return the state of each machine of the engine, the head first."""
        return self._pipeline.nodes()

    def drain_node(self, name: str) -> str:
        """Move the stages of a machine to other machines and remove it; requests continue.

        Returns:
            draining, or drained if it is no member any more.

        Raises:
            UnknownNodeError: there is no such machine.
            NodeDrainError: it cannot be drained.
            EngineUnavailableError: the engine is not ready.
        """
        return self._pipeline.drain_node(name)

    def kv_participant(self) -> KvParticipant | None:
        """Return the engine's name, role and KV transfer endpoint; None without KV transfers."""
        if self.config.kv_transfer is None:
            return None
        attachment = self._pipeline.attachment
        announce = self._announce() if attachment is None else attachment.announcement
        return KvParticipant(
            announce.name, announce.run, announce.role, announce.kv_digest, announce.kv_endpoint
        )

    def release_kv(self, tickets: list[int]) -> None:
        """Free the KV blocks that are reserved for other engines under these tickets.

        Args:
            tickets: numbers of prefills; those that still run keep no blocks when they end.
        """
        for start in range(0, len(tickets), MAX_TICKETS):
            batch = tickets[start : start + MAX_TICKETS]
            self._supervisor.send_kv_command(ReleaseKvHolds(batch))

    @property
    def role(self) -> str:
        """Current role: mixed, prefill or decode."""
        attachment = self._pipeline.attachment
        return self._attachment_config.role if attachment is None else attachment.role

    def set_role(self, role: str) -> str:
        """Announce another role to all routers and return the previous role; requests continue.

        Raises:
            RoleSwitchError: the engine has no routers.
        """
        attachment = self._pipeline.attachment
        return super().set_role(role) if attachment is None else attachment.set_role(role)

    @cached_property
    def _announce(self) -> EngineAnnouncer:
        """Function that describes the engine with the present figures."""
        return EngineAnnouncer(
            self._supervisor, self.model, self._folder, self.config, self._attachment_config
        )
