"""Engine of a router: text of requests that a fleet of engines computes."""

from dataclasses import replace
from pathlib import Path
from random import Random

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import FleetControl
from gllm.engine.text_engine import TextEngine
from gllm.models.config import read_config
from gllm.models.hub import public_name, resolve_tokenizer
from gllm.models.identity import hash_model
from gllm.router.fleet import Fleet
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.runtime.emulation.model_folder import resolve_served_model
from gllm.text.tokenizer import Tokenizer


class FleetEngine(TextEngine):
    """Engine API of a router: tokenizes and detokenizes requests that the attached engines compute.

    Args:
        config: model, addresses and policy of the router.
        served_model_name: public name of the model; by default the name of its folder or
            repository, beside which requests may name `config.model` itself.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model or the network.
    """

    def __init__(self, config: RouterConfig, served_model_name: str | None = None) -> None:
        def check(folder: Path) -> None:
            read_config(folder, config.hf_overrides)
            Tokenizer.load(resolve_tokenizer(config.tokenizer, folder), config.chat_template)

        folder = resolve_served_model(config.model, config.device, check)
        model = read_config(folder, config.hf_overrides)
        context_length = model.model.context_length
        max_model_len = config.max_model_len or context_length
        if max_model_len > context_length:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the model's context is {context_length} "
                "tokens"
            )
        pairs = None
        if config.preset is not None:
            pairs = make_pair_policy(config.preset, Random(), config.flows)
        self._fleet = Fleet(config, hash_model(folder), max_model_len, pair_policy=pairs)
        super().__init__(
            self._fleet,
            served_model_name or public_name(config.model),
            resolve_tokenizer(config.tokenizer, folder),
            model,
            max_model_len,
            config.chat_template,
            config.seed,
        )
        self.model = replace(self.model, root=config.model, has_alias=served_model_name is None)

    @property
    def fleet(self) -> FleetControl:
        """Interface to list, drain and scale the engines."""
        return self._fleet
