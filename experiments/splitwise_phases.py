"""Splitwise on single machines: its performance model, its Table IV and the second token."""

from statistics import fmean
from typing import NamedTuple

from experiments.claims import ExpectedChange, ExpectedFigure, PaperClaim
from experiments.overlapped_transfers import TransferCosts
from experiments.transfer_mode import TransferMode
from gllm.sim.costs.piecewise_linear import PiecewiseLinear
from gllm.sim.costs.splitwise import (
    Points,
    interpolate_medians,
    read_points,
    read_splitwise_profile,
)
from gllm.sim.hardware.machines import MachineType, read_machine_types
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table

MODEL_NAMES = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
"""Names of the measurements' models in MODELS."""
A100_KILOWATTS = 5.75
"""Power of a DGX-A100 that Table IV's energies contain: 7.9 Wh in 4.957 s."""
CENTS_PER_DOLLAR = 100


def mean_relative_error(function: PiecewiseLinear, points: Points) -> float:
    """Return the mean absolute relative error at points (MAPE as a fraction)."""
    return fmean(abs(function(x) / y - 1) for x, y in points)


class TableIvRow(NamedTuple):
    """Row of Table IV: Llama-2-70B without batching, at the median lengths of a workload."""

    workload: str
    machine: str
    prompt: int
    output: int
    ttft: float
    tbt: float
    e2e: float
    """Seconds, as the latencies before."""
    cents: float
    """The paper prints these figures as dollars."""
    watt_hours: float


TABLE_IV = (
    TableIvRow("code", "DGX-A100", 1500, 13, 0.185, 0.052, 0.856, 0.42, 1.37),
    TableIvRow("code", "DGX-H100", 1500, 13, 0.095, 0.031, 0.493, 0.52, 1.37),
    TableIvRow("conversation", "DGX-A100", 1020, 129, 0.155, 0.040, 4.957, 2.4, 7.9),
    TableIvRow("conversation", "DGX-H100", 1020, 129, 0.084, 0.028, 3.387, 3.6, 9.4),
)
SECOND_TOKEN = {"serialised": 0.64, "per layer": 0.165}
"""Paper: rise of the latency of the second token by the transfer, code, by mode."""
HISTORY_TOKENS, TURN_TOKENS = (512, 1500, 4096), 200
"""Tokens of a conversation at its next turn, and new tokens of that turn."""
VISIBLE_SECONDS = {"DGX-A100": 0.008, "DGX-H100": 0.005}
"""Paper: visible time of a per-layer transfer, by machine."""


def held_out_error(points: Points) -> float:
    """Return the mean relative error at each inner argument of a function without it."""
    arguments = sorted({x for x, _ in points})
    errors = []
    for held_out in arguments[1:-1]:
        function = interpolate_medians([(x, y) for x, y in points if x != held_out])
        errors.append(mean_relative_error(function, [p for p in points if p[0] == held_out]))
    return sum(errors) / len(errors)


def perf_model_table() -> tuple[str, list[PaperClaim]]:
    """Return the errors of the performance model at measurements that it has not seen."""
    rows, worst = [], 0.0
    for model in MODEL_NAMES:
        for machine in read_machine_types().values():
            prompts, tokens = read_points(model, machine.device, 8)
            errors = held_out_error(prompts), held_out_error(tokens)
            worst = max(worst, *errors)
            rows.append([model, machine.name, *(f"{100 * error:.1f} %" for error in errors)])
    table = format_table(["model", "machine", "prompt time", "time between tokens"], rows)
    claim = PaperClaim(
        "performance model: largest mean error at measurements that it has not seen",
        "< 3 % (80:20 split of the authors' 1,260 rows)",
        None,
        f"{100 * worst:.1f} % (each batch size left out in turn, 228 medians)",
    )
    return table, [claim]


def predict_row(row: TableIvRow) -> TableIvRow:
    """Return a row of Table IV by the performance model."""
    machine = read_machine_types()[row.machine]
    profile = read_splitwise_profile("llama2-70b", machine.device)
    ttft, tbt = profile.prompt_seconds(row.prompt), profile.token_seconds(1)
    e2e = ttft + (row.output - 1) * tbt
    cents = e2e / 3600 * machine.dollars_per_hour * CENTS_PER_DOLLAR
    watt_hours = e2e / 3600 * A100_KILOWATTS * machine.power * 1e3
    return row._replace(ttft=ttft, tbt=tbt, e2e=e2e, cents=cents, watt_hours=watt_hours)


def table_iv() -> tuple[str, list[PaperClaim]]:
    """Return Table IV beside the performance model: paper, ours, ratio."""
    rows, claims = [], []
    for paper in TABLE_IV:
        ours = predict_row(paper)
        for name, unit, factor, digits in (
            ("ttft", "ms", 1e3, 0),
            ("tbt", "ms", 1e3, 0),
            ("e2e", "ms", 1e3, 0),
            ("cents", "ct", 1, 2),
            ("watt_hours", "Wh", 1, 2),
        ):
            expected, value = (factor * getattr(our, name) for our in (paper, ours))
            label = f"{paper.workload}, {paper.machine}, {name.replace('_', ' ')}"
            cells = [f"{each:.{digits}f} {unit}" for each in (expected, value)]
            rows.append([label, *cells, f"{value / expected:.2f}"])
            claims.append(
                PaperClaim(f"Table IV: {label}", ExpectedFigure(expected, unit, digits), value)
            )
    return format_table(["Table IV", "paper", "ours", "ratio"], rows), claims


def transfer_costs(model: str, machine: MachineType, num_prompt_tokens: int) -> TransferCosts:
    """Return the costs of sending a prompt's KV cache over all network cards of a machine."""
    shape = MODELS[MODEL_NAMES[model]]
    seconds = read_splitwise_profile(model, machine.device).prompt_seconds(num_prompt_tokens)
    return TransferCosts(
        shape.layers,
        shape.layers * shape.kv_bytes,
        machine.link.bandwidth,
        num_prompt_tokens / seconds,
    )


def second_token_seconds(
    model: str, machine: MachineType, num_prompt_tokens: int, is_serialised: bool
) -> tuple[float, float]:
    """Return the time from the first to the second token with a transfer, and without one.

    A serialised transfer sends all layers after the prompt; per layer, only the last one is sent
    after it, as long as a layer's transfer takes no longer than its computation.
    """
    profile = read_splitwise_profile(model, machine.device)
    costs = transfer_costs(model, machine, num_prompt_tokens)
    mode = TransferMode.SERIALIZED if is_serialised else TransferMode.PER_LAYER
    visible = costs.visible_seconds(mode, num_prompt_tokens)
    alone = profile.token_seconds(1)
    return alone + visible, alone


def second_token_table(num_prompt_tokens: int = 1500) -> tuple[str, list[PaperClaim]]:
    """Return the rise of the second token's latency by mode, at the median code prompt."""
    rows, claims = [], []
    for model in MODEL_NAMES:
        for name, visible in VISIBLE_SECONDS.items():
            machine = read_machine_types()[name]
            for mode, paper in SECOND_TOKEN.items():
                is_serialised = mode == "serialised"
                seconds, alone = second_token_seconds(
                    model, machine, num_prompt_tokens, is_serialised
                )
                ours, shown = seconds / alone - 1, 1e3 * (seconds - alone)
                label = f"{model}, {name}, {mode}"
                measured = "" if is_serialised else f"{1e3 * visible:.0f} ms"
                measured_rise = "" if is_serialised else f"{100 * visible / alone:+.1f} %"
                rows.append(
                    [label, f"{100 * paper:+.1f} %", f"{100 * ours:+.1f} %", f"{ours / paper:.2f}",
                     f"{shown:.1f} ms", measured, measured_rise]
                )  # fmt: skip
                if model == "bloom-176b":
                    claims.append(PaperClaim(f"second token, {label}", ExpectedChange(paper), ours))
    header = ["second token", "paper", "ours", "ratio", "visible", "paper's visible time",
              "rise with that"]  # fmt: skip
    return format_table(header, rows), claims


def next_turn_table() -> str:
    """Return the TTFT of a conversation's next turn: KV cache sent back, or computed again."""
    rows = []
    for model in MODEL_NAMES:
        for name in VISIBLE_SECONDS:
            machine = read_machine_types()[name]
            prompt_seconds = read_splitwise_profile(model, machine.device).prompt_seconds
            for history in HISTORY_TOKENS:
                costs = transfer_costs(model, machine, history)
                transfer = costs.visible_seconds(TransferMode.SERIALIZED, history)
                again = prompt_seconds(history + TURN_TOKENS)
                back = transfer + prompt_seconds(TURN_TOKENS)
                figures = [f"{1e3 * seconds:.0f} ms" for seconds in (again, transfer, back)]
                rows.append([f"{model}, {name}", f"{history:,}", *figures, f"{again / back:.1f} x"])
    header = ["next turn", "tokens before", "computed again", "transfer", "sent back", "gain"]
    return format_table(header, rows)
