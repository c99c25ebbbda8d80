"""Configuration of a router: its model, the engines behind it, and how it divides requests."""

from dataclasses import dataclass, field

from gllm.config.emulation import EMULATED, DeviceChoices
from gllm.config.hf_overrides import OVERRIDES_HELP, convert_hf_overrides, parse_hf_overrides
from gllm.options.field_types import convert_fields
from gllm.options.flags import input_file, parse_list
from gllm.options.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.routing.disaggregation.flow import Routes, parse_routes
from gllm.routing.disaggregation.policy_registry import PAIR_POLICIES
from gllm.routing.health import HealthConfig
from gllm.routing.lengths.registry import PREDICTOR_HELP, check_length_predictor
from gllm.routing.policy_registry import POLICIES, check_placement_heartbeat
from gllm.routing.scaling.role_changes import FlipConfig
from gllm.routing.scaling.scale_config import ScaleConfig
from gllm.routing.scaling.workload_shifts import ShiftConfig

POLICY_ALIASES = {
    "cache_aware": "prefix-aware",
    "consistent_hashing": "session",
    "kvaware": "prefix-aware",
    "least_load": "least-requests",
    "power_of_two": "power-of-two",
    "prefixaware": "prefix-aware",
    "round_robin": "round-robin",
    "roundrobin": "round-robin",
}
"""Names that other routers give to policies."""


MAX_PLACEMENT_HEARTBEAT = 60.0
"""Longest heartbeat in seconds; requests wait for half of it on average."""


def parse_policy(text: str) -> str:
    """Return the name of a routing policy; names that other routers use for it are translated."""
    return POLICY_ALIASES.get(text, text)


@dataclass(frozen=True)
class RouterConfig:
    """Options of a router: model, engines, routing policy, disaggregation, health and scaling."""

    model: str = option(
        "demo",
        "a Hugging Face folder, a GGUF file, a hub name, or demo for the shipped model; only its "
        "configuration and tokenizer are loaded",
        flags=("--model", "--model-path"),
        is_common=True,
    )
    device: str = option(
        "auto",
        "emulated, or emulated:NAME as for the engines: their devices are emulated, so that the "
        "model needs no weights",
        choices=DeviceChoices(("auto", EMULATED)),
    )
    tokenizer: str | None = option(
        None,
        "folder or hub name of another tokenizer, with its chat template; default: the model's own",
    )
    chat_template: str | None = option(
        None, "Jinja file with the chat template; default: the model's own", parse=input_file
    )
    hf_overrides: str | None = option(None, OVERRIDES_HELP, parse=parse_hf_overrides)
    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt plus output; default: the model's context length. Engines with "
        "less are refused",
        ge=1,
        le=INT32_MAX,
    )
    seed: int | None = option(
        None,
        "seed from which requests without their own seed get one, in order of arrival; default: "
        "random",
        ge=0,
        le=INT64_MAX,
    )
    hub: str = option(
        "29700",
        "PORT or HOST:PORT at which engines started with --router attach; a port alone is one of "
        "this machine only, or with --node-secret-file one of all its addresses; off for none",
        is_common=True,
    )
    engines: tuple[str, ...] = option(
        (),
        "hub addresses of engines started with --hub, which the router dials: a:29701,b:29701, or "
        "dns:NAME:PORT for all addresses of a name",
        parse=parse_list,
        is_common=True,
    )
    node_secret_file: str | None = option(
        None,
        "file of `gllm node --new-secret` that encrypts the connections with the engines; needed "
        "off this machine",
        is_common=True,
    )
    max_engines: int = option(256, "maximum number of engines", ge=1, le=INT32_MAX)
    policy: str = option(
        "predict",
        "choice of an engine for each request",
        choices=tuple(POLICIES),
        flags=("--policy", "--routing-logic"),
        parse=parse_policy,
        is_common=True,
    )
    length_predictor: str | None = option(
        None,
        f"{PREDICTOR_HELP}; default: by-prompt with --policy aladdin, else by-max-tokens",
        parse=check_length_predictor,
    )
    placement_heartbeat: float = option(
        0.0,
        "with --policy aladdin, collect the requests of so many seconds and place them together, "
        "longest prompts first; 0 places each at its arrival",
        ge=0,
        le=MAX_PLACEMENT_HEARTBEAT,
    )
    kv_checkpoint: int = option(
        0,
        "copy the KV cache of running requests to another engine each time that so many tokens are "
        "computed, so that the loss of an engine costs the tokens since then; 0: no copies; needs "
        "engines with --kv-transfer",
        ge=0,
        le=INT32_MAX,
    )
    move_requests: int = option(
        0,
        "most times that a running request moves to another engine, with its KV cache, because its "
        "engine has more load than was predicted; needs engines with --kv-transfer",
        ge=0,
        le=INT32_MAX,
    )
    preset: str | None = option(
        None,
        "choose an engine for the prefill and one for the decode of each request, as a system does "
        "that separates both; engines announce their --role; default: one engine for both",
        choices=tuple(PAIR_POLICIES),
        is_common=True,
    )
    routes: tuple[str, ...] = option(
        (),
        "flows from prefill to decode engines for --preset flow, by the names of the engines: "
        "p0:d0=2.5,p0:d1=1 sends all requests to p0 and 2.5 of 3.5 on to d0; `gllm plan hetero` "
        "writes them",
        parse=parse_list,
    )
    flip: bool | None = option(
        None,
        "give the role of the other phase to prefill and decode engines that are idle while that "
        "phase is loaded; default: on with --preset tetri",
    )
    shed: bool = option(
        False, "refuse requests with 429 whose --slo-ttft or --slo-tpot no engine is likely to meet"
    )
    engine_timeout: float = option(
        5.0,
        "seconds of silence after which an engine is lost and its requests run elsewhere",
        ge=2,
        le=MAX_TIMEOUT_SECONDS,
    )
    recovery_patience: float = option(
        5.0,
        "seconds for which requests wait while their engine restarts workers, until they run "
        "elsewhere",
        ge=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    park_timeout: float = option(
        60.0,
        "seconds for which requests wait while no engine can run them, until they get 503",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    migration_limit: int = option(
        3,
        "engines that may die one after the other while they compute a request, until it ends with "
        "an error",
        ge=2,
        le=INT32_MAX,
    )
    health: HealthConfig = field(default_factory=HealthConfig)
    flip_conditions: FlipConfig = field(default_factory=FlipConfig)
    scale_conditions: ScaleConfig = field(default_factory=ScaleConfig)
    shift_conditions: ShiftConfig = field(default_factory=ShiftConfig)

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        convert_hf_overrides(self)
        convert_fields(self)
        if self.hub == "off" and not self.engines:
            raise ValueError("hub is off and engines is empty: the router needs one of both")
        check_placement_heartbeat(self.policy, self.placement_heartbeat, "policy")
        if self.move_requests and self.preset is not None:
            raise ValueError(
                f"move_requests is {self.move_requests}, but preset {self.preset} chooses the "
                "engines of both phases: leave one of them out"
            )
        if self.routes and self.preset != "flow":
            raise ValueError(
                "routes are those of preset flow: set preset to flow, or leave them out"
            )
        parse_routes(self.routes)

    @property
    def flips(self) -> bool:
        """True if idle engines may change their role between prefill and decode."""
        return self.preset == "tetri" if self.flip is None else self.flip

    @property
    def flows(self) -> Routes:
        """Planned request flow from each prefill engine to each decode engine."""
        return parse_routes(self.routes)

    @property
    def decode_choice(self) -> str:
        """Moment at which the preset chooses the decode engine; empty without a preset."""
        return "" if self.preset is None else PAIR_POLICIES[self.preset].decode_choice.value
