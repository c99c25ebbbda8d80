"""Error of the roofline against Vidur's measured token-level operators, by the form of its corner.

Run as `python -m scripts.roofline_error`. Each device and model gets the efficiencies that fit its
largest and its smallest batch; the error is the mean over all batch sizes in the table.
"""

import csv
import gzip
from collections import defaultdict
from importlib.resources import files
from math import hypot
from statistics import fmean

from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.metrics.report import format_table

DEVICES = {"a100": (312e12, 2039e9), "a40": (149.7e12, 696e9), "h100": (989e12, 3350e9)}
"""Dense bf16 FLOP/s and bytes/s, data sheets."""
MODELS = {
    "meta-llama/Llama-2-70b-hf": ModelShape(80, 8192, 64, 8, 28672, 32768),
    "meta-llama/Meta-Llama-3-8B": ModelShape(32, 4096, 32, 8, 14336, 128256),
    "codellama/CodeLlama-34b-Instruct-hf": ModelShape(48, 8192, 64, 8, 22016, 32768),
    "internlm/internlm-20b": ModelShape(60, 5120, 40, 40, 13824, 103168),
    "Qwen/Qwen-72B": ModelShape(80, 8192, 64, 64, 24576, 152064),
}
SMALLEST, LARGEST = 8, 4096
"""Tokens at which reading weights is all, and at which arithmetic is."""


def measured() -> dict[tuple[str, str], dict[int, float]]:
    """Seconds of one layer's token-level operators by device, model and tokens; one GPU."""
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(str(files("gllm.sim") / "data" / "vidur_token_ops.csv.gz"), "rt") as lines:
        for row in csv.DictReader(lines):
            if row["tp"] == "1" and row["model"] in MODELS:
                names = (name for name in row if name.endswith("_ms") and name != "emb_ms")
                total = sum(float(row[name] or 0) for name in names) / 1e3
                found[row["device"], row["model"]][int(row["num_tokens"])].append(total)
    return {key: {n: fmean(v) for n, v in times.items()} for key, times in found.items()}


def main() -> None:
    """Print the table."""
    rows = []
    for (device, model), times in measured().items():
        flops, bandwidth = DEVICES[device]
        weights = MODELS[model].layer_weights
        compute = 2 * LARGEST * weights / times[LARGEST] / flops
        memory = 2 * weights / times[SMALLEST] / bandwidth
        errors: dict[str, list[float]] = {"sum": [], "corner": [], "rounded": []}
        for tokens, seconds in times.items():
            parts = 2 * tokens * weights / (flops * compute), 2 * weights / (bandwidth * memory)
            guesses = {"sum": sum(parts), "corner": max(parts), "rounded": hypot(*parts)}
            for name, guess in guesses.items():
                errors[name].append(abs(guess / seconds - 1))
        shown = [f"{100 * fmean(each):.1f} %" for each in errors.values()]
        rows.append([device, model, f"{compute:.2f}", f"{memory:.2f}", *shown])
    header = ["device", "model", "compute", "memory", "sum", "corner (max)", "rounded (hypot)"]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
