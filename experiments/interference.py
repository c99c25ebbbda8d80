"""Interference of requests in one micro-batch: prefill and decode, each with each, and throughput.

Compares micro-batches by their predicted times; real_interference.py times the same ones on this
machine's engine. Sources: DistServe (OSDI'24) Figure 2, TetriInfer (arXiv 2401.11181) Figures 3 to
5, Splitwise (ISCA'24) Figures 4 to 9, HexGen-2 (ICLR'25) Figure 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

REFERENCE = 'arXiv 2401.11181 ("TetriInfer"), OPT-13B on V100'


class MixedStep(NamedTuple):
    """A micro-batch of whole prompts and of decodes."""

    prompts: tuple[int, ...] = ()
    """Tokens of each prompt."""
    contexts: tuple[int, ...] = ()
    """Context tokens of each decode."""

    def stage_work(self) -> StageWork:
        """Return the work for a cost model."""
        return StageWork(
            step=0,
            num_tokens=sum(self.prompts) + len(self.contexts),
            prefill_chunks=tuple((0, tokens) for tokens in self.prompts),
            num_decodes=len(self.contexts),
            num_decode_context_tokens=sum(self.contexts),
            num_sampled_rows=len(self.prompts) + len(self.contexts),
        )


@dataclass(frozen=True)
class InterferencePlan:
    """Sizes of the micro-batches; by default those of TetriInfer's figures."""

    light_prompt: int = 18
    heavy_prompt: int = 512
    light_peers: tuple[int, ...] = (1, 7, 63)
    """Numbers of further light prompts beside a light one."""
    heavy_peers: tuple[int, ...] = (1, 7)
    """Numbers of heavy prompts beside a light one."""
    decode_batches: tuple[int, ...] = (1, 8, 32, 128)
    """Numbers of decodes beside a prompt."""
    prompts: tuple[int, ...] = (18, 128, 512, 2048)
    """Prompts beside decodes, and alone for the throughput of prefill."""
    light_context: int = 64
    heavy_context: int = 512
    mixed_batch: int = 128
    """Number of decodes of which a share is heavy."""
    heavy_shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def light_step(self, light: int, heavy: int) -> MixedStep:
        """Return a light prompt with further light and heavy ones."""
        prompts = (self.light_prompt,) * (1 + light) + (self.heavy_prompt,) * heavy
        return MixedStep(prompts)

    def decodes(self, batch: int) -> MixedStep:
        """Return a batch of light decodes."""
        return MixedStep((), (self.light_context,) * batch)

    def mixture(self, prompt: int, batch: int) -> MixedStep:
        """Return a prompt beside light decodes."""
        return MixedStep((prompt,), (self.light_context,) * batch)

    def decode_mixture(self, heavy_share: float) -> MixedStep:
        """Return the mixed batch with a share of heavy decodes."""
        heavy = round(heavy_share * self.mixed_batch)
        light = self.mixed_batch - heavy
        return MixedStep((), (self.light_context,) * light + (self.heavy_context,) * heavy)

    def all_steps(self) -> list[MixedStep]:
        """Return every micro-batch once."""
        steps = [self.light_step(count, 0) for count in (0, *self.light_peers)]
        steps += [self.light_step(0, count) for count in self.heavy_peers]
        steps += [MixedStep((prompt,)) for prompt in self.prompts]
        steps += [self.decodes(batch) for batch in self.decode_batches]
        steps += [self.mixture(p, b) for p in self.prompts for b in self.decode_batches]
        steps += [self.decode_mixture(share) for share in self.heavy_shares]
        return list(dict.fromkeys(steps))


PREDICTOR = ModelShape(
    12, 768, 12, 12, 3072, 50272, head_dim=64, tied=True, gated=False, positions=2050
)
"""OPT-125M, TetriInfer's length predictor."""
PREDICTED_PROMPTS = (128, 256, 512)
"""Tokens of a prompt whose output is predicted; longer prompts are predicted alone."""
CHUNK_TOKENS = 512
"""Tokens of a prefill chunk, which the prediction runs beside."""
CORUN_LATENCY, CORUN_THROUGHPUT = 0.10, -0.12
"""Paper, Figure 17: change of the prefill's latency and throughput by the predictor beside it."""
StepTimes = dict[MixedStep, float]
"""Seconds of each micro-batch of a plan."""


class InterferenceSetting(NamedTuple):
    """Model and devices of one simulated series."""

    model: str
    device: str
    ranks: int
    paper: str

    def __str__(self) -> str:
        ranks = f" x {self.ranks}" if self.ranks > 1 else ""
        return f"{self.model} on {self.device}{ranks} (as {self.paper})"


TETRI = InterferenceSetting("opt-13b", "V100", 2, "TetriInfer")
SETTINGS = (
    TETRI,
    InterferenceSetting("opt-13b", "A100-80G", 1, "DistServe"),
    InterferenceSetting("llama-2-70b", "H100", 8, "Splitwise"),
)


def simulate_steps(setting: InterferenceSetting, plan: InterferencePlan) -> StepTimes:
    """Return the times of all micro-batches by the roofline."""
    hardware = build_hardware(
        setting.model, setting.device, 1, degrees=(setting.ranks,), rank_link="nvlink"
    )
    cost = RooflineCostModel(hardware)
    return {step: cost.stage_seconds(0, step.stage_work()) for step in plan.all_steps()}


def predictor_seconds(num_tokens: int) -> float:
    """Return the time of the length predictor for a prompt, on one of TetriInfer's GPUs.

    Args:
        num_tokens: Tokens of the prompt.
    """
    hardware = build_hardware("opt-125m", TETRI.device, 1, shape=PREDICTOR)
    return RooflineCostModel(hardware).stage_seconds(0, MixedStep((num_tokens,)).stage_work())


def predictor_section(chunk_seconds: float) -> tuple[str, list[PaperClaim]]:
    """Return the prefill beside the length predictor, and the claims of Figure 17.

    Args:
        chunk_seconds: Time of a prefill chunk of CHUNK_TOKENS alone.
    """
    rows, rises = [], {}
    for num_tokens in PREDICTED_PROMPTS:
        seconds = predictor_seconds(num_tokens)
        rise = rises[num_tokens] = seconds / chunk_seconds
        changes = [f"{100 * change:+.1f} %" for change in (rise, 1 / (1 + rise) - 1)]
        times = [show_value(each, 1e3) for each in (seconds, chunk_seconds)]
        rows.append([str(num_tokens), *times, *changes])
    text = (
        f"{TETRI.model} on {TETRI.device} x {TETRI.ranks}, a chunk of {CHUNK_TOKENS} tokens beside "
        "OPT-125M, which predicts the output length\nof one prompt on one of the GPUs. Both take "
        "turns there, so that the chunk ends later by the whole prediction; the\npaper measures "
        "both at once (Figure 17).\n\n"
    )
    header = ["prompt, tokens", "prediction, ms", "chunk, ms", "latency", "throughput"]
    most = rises[PREDICTED_PROMPTS[-1]]
    return text + format_table(header, rows), [
        PaperClaim(
            "Figure 17: latency of prefill beside the length predictor",
            ExpectedChange(CORUN_LATENCY),
            most,
        ),
        PaperClaim(
            "Figure 17: throughput of prefill beside the length predictor",
            ExpectedChange(CORUN_THROUGHPUT),
            1 / (1 + most) - 1,
        ),
    ]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Compute all micro-batches on the papers' models and devices."""
    plan = InterferencePlan()
    settings = SETTINGS[:1] if options.quick else SETTINGS
    series = {str(setting): simulate_steps(setting, plan) for setting in settings}
    tetri = series[str(TETRI)]
    predictor, predictor_claims = predictor_section(tetri[MixedStep((CHUNK_TOKENS,))])
    text = (
        "Simulated: times of single micro-batches by the "
        "[roofline](../../docs/simulator-costs.md#roofline), no queues. "
        "The requests of one micro-batch wait for all of it.\n\n"
        + interference_tables(series, plan)
        + f"\n\n## Length predictor beside the prefill\n\n{predictor}"
        + f"\n\n## Why the phases are separated\n\n{_phase_text(series, plan)}"
    )
    claims = interference_claims(str(TETRI), tetri, plan) + predictor_claims
    return ExperimentResult(
        "Interference in a micro-batch",
        text,
        claims,
        {"interference.svg": lambda path: plot_grid(interference_panels(series, plan), path)},
        REFERENCE,
    )


def interference_tables(series: dict[str, StepTimes], plan: InterferencePlan) -> str:
    """Return the four tables of all series."""
    tables = (
        ("Prefill x prefill", _prefill_rows, ["light prompt beside", "step, ms", "slower"]),
        ("Prefill x decode", _mixed_rows,
         ["prompt", "decodes", "step, ms", "decodes slower", "prefill slower"]),
        ("Decode x decode", _decode_rows,
         ["heavy decodes", "step, ms", "tokens/s", "change of tokens/s"]),
        ("Throughput by batch", _throughput_rows, ["batch", "step, ms", "tokens/s"]),
    )  # fmt: skip
    parts = [_notes(plan)]
    for title, make_rows, header in tables:
        rows = [[name, *row] for name, times in series.items() for row in make_rows(times, plan)]
        parts.append(f"## {title}\n\n{format_table(['setting', *header], rows)}")
    return "\n\n".join(parts)


def _notes(plan: InterferencePlan) -> str:
    return (
        f"Light prompts have {plan.light_prompt} tokens, heavy ones {plan.heavy_prompt}; light "
        f"decodes a context of {plan.light_context} tokens, heavy ones {plan.heavy_context}; "
        f"mixed batches have {plan.mixed_batch} decodes."
    )


def _phase_text(series: dict[str, StepTimes], plan: InterferencePlan) -> str:
    """Return what bounds each phase, and what a prompt costs the decodes beside it."""
    short, long = plan.prompts[-2:]
    few, many = plan.decode_batches[-2:]
    rows = []
    for name, times in series.items():
        prefill = long / times[MixedStep((long,))] / (short / times[MixedStep((short,))])
        decode = many / times[plan.decodes(many)] / (few / times[plan.decodes(few)])
        beside = times[plan.mixture(short, many)] / times[plan.decodes(many)]
        rows.append([name, f"{prefill:.2f} x", f"{decode:.2f} x", f"{beside:.2f} x"])
    head = [
        "setting",
        f"prompt of {long}, not {short}: tokens/s",
        f"{many} decodes, not {few}: tokens/s",
        f"{many} decodes beside a prompt of {short}: step",
    ]
    return (
        "Longer prompts hardly raise the tokens/s of prefill: its time is arithmetic. More decodes "
        "raise those of decode: its\ntime is reading the weights, once per micro-batch. In one "
        "micro-batch decodes wait for the arithmetic of the\nprompt. A limit of TPOT below such a "
        "step can be kept by shorter chunks, which read the weights more often, or by\n"
        "engines of their own for each phase, each with its own batches and ranks. A looser limit "
        "forgives the wait, and one\nengine then uses its GPUs for both phases: "
        f"[distserve](distserve.md) has both cases.\n\n{format_table(head, rows)}"
    )


def _ratio(seconds: float, base: float) -> str:
    return f"{seconds / base:.2f} x"


def _prefill_rows(times: StepTimes, plan: InterferencePlan) -> list[list[str]]:
    alone = times[plan.light_step(0, 0)]
    rows = [["nothing", show_value(alone, 1e3), _ratio(alone, alone)]]
    peers = [(count, 0, "light") for count in plan.light_peers]
    peers += [(0, count, "heavy") for count in plan.heavy_peers]
    for light, heavy, kind in peers:
        seconds = times[plan.light_step(light, heavy)]
        name = f"{light + heavy} {kind}"
        rows.append([name, show_value(seconds, 1e3), _ratio(seconds, alone)])
    return rows


def _mixed_rows(times: StepTimes, plan: InterferencePlan) -> list[list[str]]:
    rows = []
    for prompt in plan.prompts:
        for batch in plan.decode_batches:
            seconds = times[plan.mixture(prompt, batch)]
            slower = seconds, times[plan.decodes(batch)], times[MixedStep((prompt,))]
            cells = [_ratio(slower[0], base) for base in slower[1:]]
            rows.append([str(prompt), str(batch), show_value(seconds, 1e3), *cells])
    return rows


def _decode_rows(times: StepTimes, plan: InterferencePlan) -> list[list[str]]:
    light = times[plan.decode_mixture(0.0)]
    rows = []
    for share in plan.heavy_shares:
        seconds = times[plan.decode_mixture(share)]
        change = f"{100 * (light / seconds - 1):+.0f} %"
        speed = show_value(plan.mixed_batch / seconds)
        rows.append([f"{100 * share:.0f} %", show_value(seconds, 1e3), speed, change])
    return rows


def _throughput_rows(times: StepTimes, plan: InterferencePlan) -> list[list[str]]:
    steps = [(f"prompt of {tokens}", MixedStep((tokens,)), tokens) for tokens in plan.prompts]
    steps += [(f"{batch} decodes", plan.decodes(batch), batch) for batch in plan.decode_batches]
    return [
        [name, show_value(times[step], 1e3), show_value(tokens / times[step])]
        for name, step, tokens in steps
    ]


def interference_claims(name: str, times: StepTimes, plan: InterferencePlan) -> list[PaperClaim]:
    """Return TetriInfer's figures beside those of a series."""
    alone = times[plan.light_step(0, 0)]
    first, batch = plan.decode_batches[0], plan.decode_batches[1]
    half = times[plan.decode_mixture(0.5)] / times[plan.decode_mixture(0.0)]
    claims = [
        PaperClaim(
            f"{name}: light prefill beside {count} light",
            ExpectedChange(slower, is_ratio=True),
            times[plan.light_step(count, 0)] / alone - 1,
        )
        for count, slower in ((7, 1.0), (63, 7.0))
        if count in plan.light_peers
    ]
    most = plan.heavy_peers[-1]
    return [
        *claims,
        PaperClaim(
            f"{name}: light prefill beside {most} heavy",
            ExpectedLimit(10.0, is_minimum=True, unit="x", name="paper"),
            times[plan.light_step(0, most)] / alone,
        ),
        PaperClaim(
            f"{name}: light decode beside a heavy prefill",
            ExpectedChange(4.0, is_ratio=True),
            times[plan.mixture(plan.heavy_prompt, first)] / times[plan.decodes(first)] - 1,
        ),
        PaperClaim(
            f"{name}: light prefill beside {batch} decodes",
            ExpectedLimit(2.5, unit="x", name="paper"),
            times[plan.mixture(plan.light_prompt, batch)] / alone,
        ),
        PaperClaim(
            f"{name}: {plan.mixed_batch} decodes, half of them heavy: throughput",
            ExpectedChange(-0.16),
            1 / half - 1,
        ),
        PaperClaim(
            f"{name}: {plan.mixed_batch} decodes, half of them heavy: latency",
            ExpectedChange(0.23),
            half - 1,
        ),
    ]


def interference_panels(series: dict[str, StepTimes], plan: InterferencePlan) -> list[ChartPanel]:
    """Return charts of the slowdown of decodes, and of throughput."""
    last = plan.decode_batches[-1]
    charts: tuple[tuple[str, str, str, tuple[int, ...], Callable[[StepTimes, int], float]], ...] = (
        ("Prefill x decode", f"prompt beside {last} decodes, tokens", "decode step / alone",
         plan.prompts, lambda t, n: t[plan.mixture(n, last)] / t[plan.decodes(last)]),
        ("Prefill x prefill", "further light prompts", "step / alone",
         plan.light_peers, lambda t, n: t[plan.light_step(n, 0)] / t[plan.light_step(0, 0)]),
        ("Throughput of prefill", "prompt tokens", "tokens/s",
         plan.prompts, lambda t, n: n / t[MixedStep((n,))]),
        ("Throughput of decode", "decodes", "tokens/s",
         plan.decode_batches, lambda t, n: n / t[plan.decodes(n)]),
    )  # fmt: skip
    return [
        ChartPanel(
            title,
            x_label,
            y_label,
            {
                name: [(float(size), figure(times, size)) for size in sizes]
                for name, times in series.items()
            },
        )
        for title, x_label, y_label, sizes, figure in charts
    ]
