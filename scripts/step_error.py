"""Error of the roofline in whole steps, against Vidur's and Splitwise's measurements.

Run as `python -m scripts.step_error`, with `--fit` to fit the constants of whole steps again. Fits
a forest to Vidur's operator profiles, which takes half a minute.

Vidur (arXiv 2405.05465): steps of Llama-2-70B at TP 2 on A100s, composed of measured operators.
Splitwise (arXiv 2311.18677): whole steps measured on a serving engine, and its Table IV.
"""

import argparse
import csv
import gzip
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.costs.roofline import DeviceEfficiency, RooflineCostModel
from gllm.sim.deployment import USABLE_MEMORY_SHARE
from gllm.sim.hardware.stages import PipelineSpec, build_hardware
from gllm.sim.metrics.report import format_table

MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
"""Names of Splitwise's models here."""
MACHINES = {"a100-80gb": ("A100-80G", "a100-dgx"), "h100-80gb": ("H100", "h100-dgx")}
"""Device and link between ranks of Splitwise's machines; its power-capped H100 is left out."""
OUTPUT_TOKENS, LONGEST_OUTPUT = 128, 8192
"""Tokens of the answers in the rows that are compared, and of the longest answers in the table: the
end-to-end times of rows with longer answers are not consistent with their steps."""
TABLE_IV = {
    ("coding", "a100-80gb"): (1500, 13, 0.185, 0.052, 0.856),
    ("coding", "h100-80gb"): (1500, 13, 0.095, 0.031, 0.493),
    ("conversation", "a100-80gb"): (1020, 129, 0.155, 0.040, 4.957),
    ("conversation", "h100-80gb"): (1020, 129, 0.084, 0.028, 3.387),
}
"""Splitwise's Table IV, Llama-2-70B at TP 8: median prompt and output tokens of the workload, then
median TTFT, TBT and E2E in seconds."""
TPS = (2, 4, 8)
"""Tensor-parallel sizes of Llama-2-70B in Splitwise's table."""
SEEN_TPS, HELD_OUT_TPS = (2, 8), (4,)
"""Those that the fit sees, and those that it does not; BLOOM is held out too."""

Predict = Callable[[StageWork], float]


class SplitwiseStep(NamedTuple):
    """One measured step of one stage."""

    model: str
    device: str
    tp: int
    kind: str
    work: StageWork
    seconds: float


class VidurStep(NamedTuple):
    """One step of Llama-2-70B at TP 2 as the forests predict it."""

    kind: str
    work: StageWork
    seconds: float


def prefill_work(batch_size: int, num_tokens: int, num_cached_tokens: int = 0) -> StageWork:
    """Return a batch of equal prompts or chunks."""
    chunks = ((num_cached_tokens, num_tokens),) * batch_size
    return StageWork(0, batch_size * num_tokens, chunks, 0, 0, batch_size)


def decode_step_work(batch_size: int, context: int) -> StageWork:
    """Return a batch of decodes with equal contexts."""
    return StageWork(0, batch_size, (), batch_size, batch_size * context, batch_size)


def mixed_work(chunk: int, num_cached_tokens: int, num_decodes: int, context: int) -> StageWork:
    """Return decodes with equal contexts and one chunk of a prompt."""
    chunks = ((num_cached_tokens, chunk),)
    num_context = num_decodes * context
    return StageWork(0, chunk + num_decodes, chunks, num_decodes, num_context, num_decodes)


def vidur_works() -> Iterator[tuple[str, StageWork]]:
    """Yield the compared steps: prefills, decodes and both together, over the measured range."""
    chunks = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    cached = (0, 512, 1024, 2048, 3072)
    yield from (
        ("prefill", prefill_work(1, chunk, kv))
        for chunk in chunks
        for kv in cached
        if chunk + kv <= 4096
    )
    yield from (
        ("decode", decode_step_work(batch, context))
        for batch in (1, 2, 4, 8, 16, 32, 64, 96, 128)
        for context in (64, 256, 512, 1024, 2048, 4000)
    )
    yield from (
        ("mixed", mixed_work(chunk, kv, batch, context))
        for chunk in (64, 128, 256, 512, 1024, 2048)
        for kv in (0, 1024)
        for batch in (8, 32, 64, 120)
        for context in (256, 1024, 2048)
    )


@cache
def vidur_steps() -> list[VidurStep]:
    """Return the steps of Vidur's profiles, predicted by forests."""
    forest = ForestCostModel(1)
    return [VidurStep(kind, work, forest.stage_seconds(0, work)) for kind, work in vidur_works()]


@cache
def splitwise_steps(longest_output: int = OUTPUT_TOKENS) -> list[SplitwiseStep]:
    """Return the measured steps whose KV cache fits; others were not one step.

    Args:
        longest_output: Tokens of the longest answers whose rows are returned.
    """
    path = files("gllm.sim") / "data" / "splitwise_perf_model.csv.gz"
    steps = []
    for row in csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()):
        output = int(row["output_tokens"])
        if row["device"] not in MACHINES or output > longest_output:
            continue
        key = row["model"], row["device"], int(row["tp"])
        batch, prompt = int(row["batch_size"]), int(row["prompt_tokens"])
        (capacity,) = splitwise_hardware(*key).stage_kv_blocks(1, USABLE_MEMORY_SHARE)
        if batch * (prompt + output) > capacity:
            continue
        decodes = decode_step_work(batch, prompt + output // 2)
        prefill, decode = float(row["prefill_ms"]) / 1e3, float(row["decode_step_ms"]) / 1e3
        steps.append(SplitwiseStep(*key, "prefill", prefill_work(batch, prompt), prefill))
        steps.append(SplitwiseStep(*key, "decode", decodes, decode))
    return steps


@cache
def splitwise_hardware(model: str, device: str, tp: int) -> PipelineSpec:
    """Return one of Splitwise's machines: one stage of `tp` ranks."""
    name, link = MACHINES[device]
    return build_hardware(MODELS[model], name, 1, degrees=(tp,), rank_link=link)


def vidur_hardware() -> PipelineSpec:
    """Return the two A100s of Vidur's profiles."""
    return build_hardware("llama-2-70b", "A100-80G", 1, degrees=(2,), rank_link="a100-pairs")


def predictor(
    hardware: PipelineSpec,
    efficiency: DeviceEfficiency | None = None,
    launch_seconds: float | None = None,
) -> Predict:
    """Return a roofline's prediction of a step.

    Args:
        hardware: One stage.
        efficiency: Default: the constants of gllm.
        launch_seconds: Outranks the launch time per layer of the device.
    """
    if launch_seconds is not None:
        (stage,) = hardware.stages
        device = replace(stage.device, launch_seconds=launch_seconds)
        hardware = replace(hardware, stages=(replace(stage, device=device),))
    cost = RooflineCostModel(hardware, efficiency)
    return lambda work: cost.stage_seconds(0, work)


def vidur_errors(
    efficiency: DeviceEfficiency | None = None, launch_seconds: float | None = None
) -> dict[str, list[float]]:
    """Return the relative errors against Vidur's steps, by kind of step."""
    predict = predictor(vidur_hardware(), efficiency, launch_seconds)
    errors: dict[str, list[float]] = defaultdict(list)
    for step in vidur_steps():
        errors[step.kind].append(predict(step.work) / step.seconds - 1)
    return errors


def splitwise_errors(
    efficiency: DeviceEfficiency | None = None,
    launch_seconds: Mapping[str, float] | None = None,
    longest_output: int = OUTPUT_TOKENS,
) -> dict[tuple[str, str, int, str], list[float]]:
    """Return the relative errors against Splitwise's steps by model, device, tp and kind."""
    errors: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    predictors: dict[tuple[str, str, int], Predict] = {}
    for step in splitwise_steps(longest_output):
        key = step.model, step.device, step.tp
        if key not in predictors:
            launch = (launch_seconds or {}).get(step.device)
            predictors[key] = predictor(splitwise_hardware(*key), efficiency, launch)
        error = predictors[key](step.work) / step.seconds - 1
        errors[(*key, step.kind)].append(error)
    return errors


def mean_error(errors: Sequence[float]) -> float:
    """Return the mean of absolute relative errors."""
    return fmean(map(abs, errors))


def splitwise_mean(
    errors: Mapping[tuple[str, str, int, str], list[float]],
    model: str = "llama2-70b",
    kind: str | None = None,
    tps: Sequence[int] = TPS,
) -> float:
    """Return the mean error over steps of a model, of one kind or of all."""
    chosen = [
        error
        for (each, _, tp, each_kind), values in errors.items()
        if each == model and tp in tps and kind in (None, each_kind)
        for error in values
    ]
    return mean_error(chosen)


def table_iv_rows() -> list[list[str]]:
    """Return Table IV beside the roofline: TTFT, TBT and E2E of an unbatched median request."""
    rows = []
    for (workload, device), (prompt, output, *measured) in TABLE_IV.items():
        predict = predictor(splitwise_hardware("llama2-70b", device, 8))
        ttft = predict(prefill_work(1, prompt))
        tbt = predict(decode_step_work(1, prompt + output // 2))
        predicted = ttft, tbt, ttft + (output - 1) * tbt
        cells = [
            f"{1e3 * ours:.0f} / {1e3 * theirs:.0f} ms ({ours / theirs - 1:+.0%})"
            for ours, theirs in zip(predicted, measured, strict=True)
        ]
        rows.append([workload, MACHINES[device][0], *cells])
    return rows


def error_rows(errors: Mapping[tuple[str, ...], list[float]]) -> list[list[str]]:
    """Return table rows: the key, the number of steps, mean absolute error and mean error."""
    return [
        [*map(str, key), str(len(values)), f"{mean_error(values):.1%}", f"{fmean(values):+.1%}"]
        for key, values in errors.items()
    ]


def fit() -> None:
    """Fit the constants of whole steps; print them and the errors on steps that are held out.

    Fits the speed of attention and collectives and the launch time per layer of both machines. The
    other constants come from single operators (`scripts/roofline_error.py`) and host times.
    """
    start = DeviceEfficiency()
    initial = [start.attention, start.collective, 0.5e-3, 0.4e-3]

    def constants(scales: Sequence[float]) -> tuple[DeviceEfficiency, dict[str, float]]:
        attention, collective, *launches = (
            abs(scale) * value for scale, value in zip(scales, initial, strict=True)
        )
        efficiency = replace(start, attention=attention, collective=collective)
        return efficiency, dict(zip(MACHINES, launches, strict=True))

    def objective(scales: Sequence[float]) -> float:
        efficiency, launches = constants(scales)
        vidur = vidur_errors(efficiency, launches["a100-80gb"])
        splitwise = splitwise_errors(efficiency, launches)
        vidur_error = mean_error([error for errors in vidur.values() for error in errors])
        return vidur_error + splitwise_mean(splitwise, tps=SEEN_TPS)

    optimize = importlib.import_module("scipy.optimize")
    scales = optimize.minimize(objective, [1.0] * len(initial), method="Nelder-Mead").x
    efficiency, launches = constants(scales)
    errors = splitwise_errors(efficiency, launches)
    print(f"attention {efficiency.attention:.2f}, collective {efficiency.collective:.2f}")
    print("launch", {device: f"{1e3 * value:.2f} ms" for device, value in launches.items()})
    print(f"seen, 70B at TP 2 and 8: {splitwise_mean(errors, tps=SEEN_TPS):.1%}")
    print(f"held out, 70B at TP 4: {splitwise_mean(errors, tps=HELD_OUT_TPS):.1%}")
    print(f"held out, BLOOM-176B at TP 8: {splitwise_mean(errors, 'bloom-176b'):.1%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants of whole steps")
    if parser.parse_args().fit:
        fit()
        return
    header = ["steps", "mean error", "bias"]
    vidur: dict[tuple[str, ...], list[float]]
    vidur = {("Vidur", kind): errors for kind, errors in vidur_errors().items()}
    vidur["Vidur", "all"] = [error for errors in vidur.values() for error in errors]
    print(format_table(["yardstick", "kind", *header], error_rows(vidur)))
    splitwise = splitwise_errors()
    keyed: dict[tuple[str, ...], list[float]]
    keyed = {tuple(map(str, key)): errors for key, errors in splitwise.items()}
    print(format_table(["model", "device", "tp", "kind", *header], error_rows(keyed)))
    typical = DeviceEfficiency().launch_seconds
    same_host = splitwise_errors(launch_seconds=dict.fromkeys(MACHINES, typical))
    all_rows = splitwise_errors(longest_output=LONGEST_OUTPUT)
    for title, errors in (
        ("", splitwise),
        (", typical host for all", same_host),
        (", longer answers too", all_rows),
    ):
        print(
            f"Splitwise, 70B at TP 2, 4, 8{title}: {splitwise_mean(errors):.1%} "
            f"(prefill {splitwise_mean(errors, kind='prefill'):.1%}, "
            f"decode {splitwise_mean(errors, kind='decode'):.1%}); "
            f"BLOOM-176B: {splitwise_mean(errors, 'bloom-176b'):.1%}"
        )
    header = ["workload", "device", "TTFT, ours / Table IV", "TBT", "E2E"]
    print(format_table(header, table_iv_rows()))


if __name__ == "__main__":
    main()
