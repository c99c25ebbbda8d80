"""Request for a service: its model, its nodes, and the parameters of its engine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.config.engine import EngineConfig
from gllm.deploy.cluster.selection import NodeRequirements
from gllm.options.field_types import FieldError

INFERENCE_PARAMETERS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_model_len",
    "kv_cache_memory",
    "seed",
    "policy",
    "max_prefill_tokens",
    "min_prefill_tokens",
    "prefill_iterations",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_in_flight",
    "expected_output_tokens",
    "async_scheduling",
    "block_size",
    "prefix_cache",
)
"""Flags of `gllm serve`, with underscores, that a service may set. Flags with paths and addresses
are those of the node's owner, and the number of stages follows from the nodes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class ServiceRequest:
    """Service to deploy.

    Raises:
        FieldError: a field is invalid; the message names it and the fix.
    """

    name: str
    model: str
    """Model by its hub name, demo, or a folder that all nodes have."""
    requirements: NodeRequirements = field(default_factory=NodeRequirements)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Values of INFERENCE_PARAMETERS."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FieldError(
                "service_name",
                f"service_name {self.name!r:.80} has to have 1 to 63 letters, digits, dots, "
                "hyphens and underscores, and begin with a letter or a digit",
            )
        if not self.model or not self.model.isprintable() or self.model.startswith("-"):
            raise FieldError("model_name", "model_name has to be the name or folder of a model")
        check_parameters(self.model, self.parameters)


def check_parameters(model: str, parameters: Mapping[str, Any]) -> None:
    """Check the parameters of an engine.

    Raises:
        FieldError: a parameter is unknown or has an invalid value; the message names it.
    """
    unknown = sorted(set(parameters) - set(INFERENCE_PARAMETERS))
    if unknown:
        raise FieldError(
            "inference_parameters",
            f"inference_parameters has {', '.join(map(repr, unknown))[:200]}, but may have "
            f"{', '.join(INFERENCE_PARAMETERS)}",
        )
    try:
        EngineConfig.from_options(model, **parameters)
    except ValueError as error:
        raise FieldError("inference_parameters", f"inference_parameters: {error}") from error
