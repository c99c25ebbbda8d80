"""Facts about an engine that its machines compare when they join."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gllm.config.engine import EngineConfig
from gllm.messages.nodes import PROTOCOL
from gllm.models.identity import hash_model
from gllm.options.version import __version__
from gllm.recovery.join_check import JoinFacts


def make_join_facts(config: EngineConfig, folder: Path, max_model_len: int) -> JoinFacts:
    """Return the facts of this machine, as head or as a machine with a rank.

    Args:
        config: of the engine.
        folder: of the model.
        max_model_len: most tokens of a sequence, which `config` may leave to the model.

    Raises:
        ModelError: the model's files cannot be read.
    """
    resolved = replace(config, max_model_len=max_model_len)
    return JoinFacts(
        PROTOCOL, __version__, config.model, hash_model(folder), msgspec.json.encode(resolved)
    )
