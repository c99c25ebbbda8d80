"""Description of an engine for its routers, and the attachment made of its configuration."""

from functools import lru_cache, partial
from pathlib import Path

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.engine.attachment.attachment import RouterAttachment
from gllm.engine.interface import ModelInfo
from gllm.messages.fleet import OLDEST_PROTOCOL, PROTOCOL, AnnounceEngine
from gllm.models.identity import hash_model, hash_numerics
from gllm.options.version import __version__
from gllm.runtime.head.supervisor import Supervisor
from gllm.runtime.messaging.link_config import FleetLinkConfig, default_engine_name, new_run


class EngineAnnouncer:
    """Callable that returns the current announcement of an engine to routers."""

    def __init__(
        self,
        supervisor: Supervisor,
        model: ModelInfo,
        folder: Path,
        config: EngineConfig,
        attachment: AttachmentConfig,
    ) -> None:
        """Create the announcer; reads parts of the model's files.

        Args:
            supervisor: of the engine.
            model: the served model.
            folder: of the model.
            config: of the engine, with max_model_len resolved.
            attachment: role and name.

        Raises:
            ModelError: the model's files cannot be read.
        """
        self.name = attachment.name or default_engine_name()
        self._supervisor = supervisor
        self._model = model
        self._config = config
        self._role = attachment.role
        self._run = new_run()
        self._model_hash = hash_model(folder)
        self._resolve = lru_cache(maxsize=1)(config.scheduler.resolve)
        # Announcements are compared twice per second, and seldom change.
        self._hash_numerics = lru_cache(maxsize=1)(partial(hash_numerics, self._model_hash))

    def __call__(self) -> AnnounceEngine:
        """Return the announcement with the present figures."""
        supervisor, model = self._supervisor, self._model
        num_blocks = supervisor.num_blocks
        block_size = self._config.scheduler.block_size
        num_stages = len(supervisor.planner.layers)
        # Only sizes that do not depend on the number of blocks are read.
        limits = self._resolve(
            num_stages, max(num_blocks, -(-model.max_model_len // block_size)), model.max_model_len
        )
        return AnnounceEngine(
            PROTOCOL,
            OLDEST_PROTOCOL,
            self.name,
            self._run,
            self._role,
            model.name,
            self._model_hash,
            self._hash_numerics(supervisor.numerics),
            __version__,
            model.max_model_len,
            model.vocab_size,
            block_size,
            num_blocks,
            num_stages,
            limits.max_num_seqs,
            limits.max_num_batched_tokens or 0,
            supervisor.kv_mover.endpoint,
            supervisor.kv_mover.bytes_per_token,
            policy=limits.policy,
            kv_digest=supervisor.kv_mover.digest,
            accepts_prefetches=True,
        )


def attach_to_routers(
    supervisor: Supervisor, announcer: EngineAnnouncer, attachment: AttachmentConfig
) -> RouterAttachment:
    """Return the router sessions of an engine; they have not started.

    Raises:
        ValueError: an address or the secret cannot be used.
    """
    links = FleetLinkConfig(
        attachment.hub, attachment.router, attachment.node_secret_file, attachment.router_timeout
    )
    routers = RouterAttachment(supervisor, announcer, links)
    supervisor.kv_mover.on_prefill = routers.on_prefill
    return routers
