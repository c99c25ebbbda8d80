"""Options of emulated devices: the source of step times, and the output of requests.

With `--device emulated:NAME` workers compute nothing: each step takes the time that a cost model of
gllm/sim predicts for that device, and everything else is real.
"""

from dataclasses import dataclass

from gllm.options.field_types import FieldError, convert_fields
from gllm.options.options import option

EMULATED = "emulated"
"""Value of --device, alone or followed by a colon and names of devices."""
TO_LIMIT, FIXED, TRACE = "limit", "fixed:", "trace:"
"""Values of --emulated-output, or their beginnings."""
PROMPT, PASSAGE = "prompt", "passage"
"""Values of --emulated-text that are no files."""
DEFAULT_HOST = "200:4"
"""An assumption, not measured: half of the memory bandwidth of a server with 12 channels of DDR5,
and a tenth of the arithmetic of its cores with AMX."""


class DeviceChoices(tuple[str, ...]):
    """Values of --device; the name of an emulated device may follow `emulated:`."""

    def __contains__(self, value: object) -> bool:
        """Return True for a choice, and for an emulated device whatever its name."""
        if super().__contains__(value):
            return True
        return isinstance(value, str) and value.startswith(f"{EMULATED}:") and value[-1] != ":"


DEVICES = DeviceChoices(("auto", "cpu", "cuda", EMULATED))
"""Values of --device."""


@dataclass(frozen=True)
class EmulationConfig:
    """Options of `--device emulated`: where step times come from, and what requests return."""

    emulated_profile: str | None = option(
        None,
        "with --device emulated: measured step times, as --profile of gllm simulate; default: the "
        "roofline of the device",
    )
    emulated_link: str = option(
        "pcie",
        "with --device emulated: link between neighbouring stages, as --link of gllm simulate",
    )
    emulated_rank_link: str | None = option(
        None,
        "with --device emulated: link between the ranks of a stage, as --tensor-parallel-link of "
        "gllm simulate",
    )
    emulated_bytes_per_weight: float | None = option(
        None,
        "with --device emulated: bytes per weight: 2 is bfloat16, 1 fp8 or int8, 0.5 four bits; "
        "default: the model's",
        gt=0,
        le=4,
    )
    emulated_host: str = option(
        DEFAULT_HOST,
        "with --device emulated and --cpu-experts: gigabytes per second at which cores of the host "
        "read weights and their teraflops, as --host of gllm simulate",
    )
    emulated_output: str = option(
        TO_LIMIT,
        "with --device emulated: tokens until a request's end: limit (its max_tokens), fixed:N, or "
        "trace:NAME (output lengths of a workload of gllm simulate)",
    )
    emulated_text: str = option(
        PASSAGE,
        "with --device emulated: text of outputs: a file, prompt (the request's own, repeated), or "
        "passage (built in)",
    )
    emulated_bytes: bool = option(
        True,
        "with --device emulated: activations between stages and entries of KV caches have their "
        "real size; --no-emulated-bytes sends headers alone, and keeps an element per head and key",
    )
    emulated_speed: float = option(
        1.0,
        "with --device emulated: all step and link times are divided by this",
        gt=0,
        le=1000,
    )

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises FieldError that names the field and the fix."""
        convert_fields(self)
        if fixed_output(self.emulated_output) is None and not (
            self.emulated_output == TO_LIMIT
            or (self.emulated_output.startswith(TRACE) and self.emulated_output != TRACE)
        ):
            raise FieldError(
                "emulated_output",
                f"emulated_output is {self.emulated_output!r}, but has to be {TO_LIMIT}, {FIXED}N "
                f"with a number from 1 on, or {TRACE}NAME",
            )


def fixed_output(value: str) -> int | None:
    """Return the number N of a value `fixed:N` of --emulated-output; None if it is another one."""
    number = value.removeprefix(FIXED)
    is_fixed = value.startswith(FIXED) and number.isascii() and number.isdigit() and int(number)
    return int(number) if is_fixed else None


def is_emulated(device: str) -> bool:
    """Return True if a value of --device is an emulated device."""
    return device == EMULATED or device.startswith(f"{EMULATED}:")


def emulated_devices(device: str, num_stages: int) -> list[str]:
    """Return the name of the emulated devices of each stage, such as emulated:L20.

    Args:
        device: value of --device that is an emulated device.
        num_stages: stages at present.
    """
    names = fit_names(emulated_name(device), num_stages).split(",")
    return [f"{EMULATED}:{name}" if name else EMULATED for name in names]


def fit_names(text: str, count: int) -> str:
    """Return names for a changed number of stages or links, separated by commas.

    The configured names are those of the first start: the last one stands for further ones.

    Args:
        text: configured names, separated by commas.
        count: stages or links at present; one name is left at least.
    """
    names = text.split(",")
    return ",".join([*names, *names[-1:] * count][: max(count, 1)])


def emulated_name(device: str) -> str:
    """Return the names of devices in a value of --device; empty if it names none."""
    return device.removeprefix(EMULATED).removeprefix(":")
