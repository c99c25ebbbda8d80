"""Error of the roofline against Vidur's measured token-level operators, by the form of its corner.

Run as `python -m scripts.roofline_error`. Three columns compare forms of the corner: each device
and model gets the efficiencies that fit its largest and its smallest batch, and the operators are
one product. The last column is the layer of gllm's cost model with its own constants. Errors are
means over all batch sizes in the table. `--fit` fits those constants again.
"""

import argparse
import csv
import gzip
import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from math import hypot
from statistics import fmean

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import DeviceEfficiency, LayerRoofline
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import StageSpec
from gllm.sim.metrics.report import format_table

MACHINES = {"a100": "A100-80G", "a40": "A40", "h100": "H100"}
"""Names of the profiled devices here."""
PROFILED_MODELS = {
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
    "internlm/internlm-20b": "internlm-20b",
    "Qwen/Qwen-72B": "qwen-72b",
}
"""Names of the profiled models here."""
SMALLEST, LARGEST = 8, 4096
"""Tokens at which reading weights is all, and at which arithmetic is."""

LayerTimes = dict[tuple[str, str, int], dict[int, float]]
"""Seconds of a layer by device, model and tensor-parallel size, then by tokens."""


def read_layer_times() -> LayerTimes:
    """Return the measured time of one layer's token-level operators on one rank."""
    times: dict[tuple[str, str, int], dict[int, list[float]]]
    times = defaultdict(lambda: defaultdict(list))
    with gzip.open(str(files("gllm.sim") / "data" / "vidur_token_ops.csv.gz"), "rt") as lines:
        for row in csv.DictReader(lines):
            if row["model"] not in PROFILED_MODELS or int(row["num_tokens"]) > LARGEST:
                continue
            names = (name for name in row if name.endswith("_ms") and name != "emb_ms")
            # Two residuals per layer; the table has the time of one.
            total = sum(float(row[name] or 0) for name in names) + float(row["add_ms"])
            key = MACHINES[row["device"]], PROFILED_MODELS[row["model"]], int(row["tp"])
            times[key][int(row["num_tokens"])].append(total / 1e3)
    return {key: {n: fmean(v) for n, v in by_tokens.items()} for key, by_tokens in times.items()}


def layer_error(
    key: tuple[str, str, int], times: dict[int, float], efficiency: DeviceEfficiency
) -> float:
    """Return the mean error of a layer of the cost model, launches left out."""
    device, model, tp = key
    stage = StageSpec(1, replace(DEVICES[device], launch_seconds=0.0))
    # A shard on one device computes what a rank does, without the sums.
    layer = LayerRoofline(MODELS[model].shard(tp), stage, efficiency)
    return fmean(
        abs(sum(layer.seconds(StageWork(0, tokens, (), 0, 0, 0), False)) / seconds - 1)
        for tokens, seconds in times.items()
    )


def corner_row(key: tuple[str, str, int], times: dict[int, float]) -> list[str]:
    """Return the efficiencies of a device and model, and the errors of each form of the corner."""
    device, weights = DEVICES[key[0]], MODELS[key[1]].layer_weights
    compute = 2 * LARGEST * weights / times[LARGEST] / device.flops
    memory = 2 * weights / times[SMALLEST] / device.bandwidth
    errors: dict[str, list[float]] = {"sum": [], "corner": [], "rounded": []}
    for tokens, seconds in times.items():
        arithmetic = 2 * tokens * weights / (device.flops * compute)
        traffic = 2 * weights / (device.bandwidth * memory)
        guesses = {
            "sum": arithmetic + traffic,
            "corner": max(arithmetic, traffic),
            "rounded": hypot(arithmetic, traffic),
        }
        for name, guess in guesses.items():
            errors[name].append(abs(guess / seconds - 1))
    means = [fmean(each) for each in errors.values()]
    means.append(layer_error(key, times, DeviceEfficiency()))
    return [*key[:2], f"{compute:.2f}", f"{memory:.2f}", *(f"{mean:.1%}" for mean in means)]


def fit(layer_times: LayerTimes) -> None:
    """Fit the constants of single operators to all devices, models and numbers of ranks."""
    start = DeviceEfficiency()
    initial = [start.compute, start.memory, start.kernel_seconds]

    def constants(scales: Sequence[float]) -> DeviceEfficiency:
        compute, memory, kernel_seconds = (
            abs(scale) * value for scale, value in zip(scales, initial, strict=True)
        )
        return replace(start, compute=compute, memory=memory, kernel_seconds=kernel_seconds)

    def objective(scales: Sequence[float]) -> float:
        efficiency = constants(scales)
        return fmean(layer_error(key, times, efficiency) for key, times in layer_times.items())

    optimize = importlib.import_module("scipy.optimize")
    scales = optimize.minimize(objective, [1.0] * len(initial), method="Nelder-Mead").x
    best = constants(scales)
    print(
        f"compute {best.compute:.2f}, memory {best.memory:.2f}, "
        f"kernels {1e6 * best.kernel_seconds:.0f} us: {objective(scales):.1%}; "
        f"gllm's constants: {objective([1.0] * len(initial)):.1%}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants of operators")
    layer_times = read_layer_times()
    if parser.parse_args().fit:
        fit(layer_times)
        return
    header = ["device", "model", "compute", "memory", "sum", "corner (max)", "rounded (hypot)"]
    rows = [corner_row(key, times) for key, times in layer_times.items() if key[2] == 1]
    print(format_table([*header, "gllm"], rows))
    error = fmean(layer_error(key, times, DeviceEfficiency()) for key, times in layer_times.items())
    print(f"gllm's constants, all devices, models and TP 1, 2, 4, 8: {error:.1%}")


if __name__ == "__main__":
    main()
