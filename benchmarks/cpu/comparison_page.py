"""Writer of the comparison's page: docs/benchmarks/cpu.md, its charts and the figures behind them.

Works from the saved results alone.
"""

import shutil
from pathlib import Path
from statistics import median

from benchmarks.cpu import results
from benchmarks.cpu.aims import verdict_table
from benchmarks.cpu.loads import rate_name
from benchmarks.cpu.peers import PEERS
from benchmarks.cpu.report import (
    SPEEDS,
    cells_of,
    hybrid_table,
    latency_table,
    limits,
    load_table,
    machine_table,
    peers_of,
    speed_table,
    use_table,
    values,
)
from benchmarks.cpu.results import Results
from benchmarks.cpu.workplace import ROOT
from gllm.sim.metrics.plots import ChartPanel, Series, plot_bars, plot_grid

DOCS = ROOT / "docs" / "benchmarks"
HEAD = """# Beside other engines on a CPU

Made by `python -m benchmarks.cpu.compare --mode docs` of the results in [cpu/](cpu/); overwritten \
by it.

A random model in the shape of Qwen2.5-0.5B (494 M parameters, bfloat16), the same for all. Every \
peer runs in an environment of its own, is started afresh in every round, and the order of peers \
alternates. Ratios are medians of the rounds' ratios. Foreign CPU is what processes other than the \
peer and the client used meanwhile, as a share of all cores. Peak PSS is the largest sum over the \
peer's processes; llama.cpp's includes its memory-mapped weights. Limits are rooflines of the read \
bandwidth and the bfloat16 GEMM rate measured in the same run: nothing computes and reads at both \
at once, least of all at batch 16. Pictures show speeds as shares of them."""
TITLES = {
    "server": "Servers: equal requests at once",
    "poisson": "Servers: lengths of traces",
    "in-process": "In process, without HTTP",
    "four-bit": "In process, weights of 4 bits",
    "hybrid": "In process, models with recurrent layers",
}
LLAMA_WITHOUT_AMX = (
    "On a processor with AMX llama.cpp is built with -mno-amx-tile, -mno-amx-int8 and "
    "-mno-amx-bf16 (--llama-bin): its own use of AMX ends with a general protection fault there."
)
NOTES = {
    "server": "Streamed `/v1/completions` with the same token ids for all, greedy, outputs of full "
    "length, no prefix cache; {streams} requests are sent at once, {prompt} prompt and {new} "
    "output tokens each. Throughput counts prefill time too. {repeats} repeats in each of {rounds} "
    "rounds: median (least-largest).",
    "poisson": "Lengths of the Azure traces divided by 8; at once, and with Poisson arrivals of "
    "azure-conv's lengths, {requests} requests at each rate. {rounds} rounds: median "
    "(least-largest).",
    "in-process": "Decode: batches of {streams} prompts of {prompt} tokens, {new} new ones; the "
    "time of the batch less that of the same batch with one new token. Prefill: one prompt, one "
    "new token. {repeats} repeats in each of {rounds} rounds: median (least-largest). llama.cpp "
    "by its own `llama-batched-bench`.",
    "four-bit": "As above. GGUF files are made by llama.cpp's quantizer and read by both engines; "
    "rows of 896 weights are no multiple of 256, so that q4_k_m has Q5_0 and Q8_0 in place of Q4_K "
    "and Q6_K. gllm-int4 quantizes at load, vllm-int4 reads symmetric GPTQ in groups of 128, "
    "openvino-int4 is what `optimum-cli --weight-format int4` writes. Reading: a step that only "
    f"reads the file and the KV cache. {LLAMA_WITHOUT_AMX}",
    "hybrid": "As above, with random models of as many bytes of weights: LFM2 (gated short "
    "convolutions in 18 of 24 layers, an inner size of 4,480) and Qwen3.5-0.8B (gated delta nets "
    "in 12 of 16 layers, an inner size of 3,712), both with the vocabulary of the dense model, "
    f"whose limits are given. Ratios are medians of the rounds' ratios. {LLAMA_WITHOUT_AMX}",
}


def sections(run: Results) -> list[str]:
    """Return a mode's part of the page: command and device, tables, verdicts."""
    if run.mode == "poisson":
        tables = [f"### {cell}\n\n{load_table(run, cell)}" for cell in cells_of(run)]
    else:
        tables = [speed_table(run)]
    if run.mode == "server":
        tables.append(latency_table(run))
    if run.mode == "hybrid":
        tables.append(hybrid_table(run))
    if run.rows:
        tables.append(use_table(run))
    if verdicts := verdict_table(run):
        tables.append(f"Aims:\n\n{verdicts}")
    versions = "; ".join(f"{peer}: {version}" for peer, version in run.versions.items())
    asked = {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in run.asked.items()
    }
    return [
        f"## {TITLES[run.mode]}",
        f"`{run.command}`, {run.date}. {run.device}, {run.asked['threads']} threads. {versions}.",
        NOTES[run.mode].format(**asked),
        *tables,
        *format_failures(run),
        machine_table(run),
    ]


def format_failures(run: Results) -> list[str]:
    """List the peers that are missing or failed, with the reason."""
    lines = [f"- {peer}: {why}" for peer, why in run.refused.items()]
    return ["Not measured, or not to the end:\n\n" + "\n".join(lines)] if lines else []


def write_docs(folder: Path, docs: Path = DOCS) -> Path:
    """Write the page for a folder of results into `docs` and return its path.

    Raises:
        ValueError: The folder has no results.
        OSError: A file cannot be read or written.
    """
    pages = [HEAD]
    target = docs / "cpu"
    for mode in TITLES:
        # Those of another machine have its name behind the mode: MODE-NAME.json.
        paths = [folder / f"{mode}.json", *sorted(folder.glob(f"{mode}-*.json"))]
        for path in filter(Path.exists, paths):
            run = results.load(path)
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)
            parts = sections(run)
            if name := path.stem.removeprefix(mode).removeprefix("-"):
                parts[0] += f", {name}"
            pictures = [f"![{TITLES[mode]}](cpu/{name})" for name in draw_charts(run, target)]
            pages += [*parts[:3], *pictures, *parts[3:]]
    if len(pages) == 1:
        raise ValueError(f"{folder} has no results: measure first, with the same --work")
    page = docs / "cpu.md"
    page.write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    return page


def draw_charts(run: Results, folder: Path) -> list[str]:
    """Draw a mode's charts and return their file names."""
    if run.mode == "poisson":
        plot_grid(rate_panels(run), folder / "poisson.png")
        return ["poisson.png"]
    names = []
    for weights in ("bf16", "int8"):
        if bars := speed_bars(run, weights):
            names.append(f"{run.mode}-{weights}.png")
            plot_bars(bars, folder / names[-1], "of the limit", f"{TITLES[run.mode]}, {weights}")
    return names


def speed_bars(run: Results, weights: str) -> dict[str, dict[str, float]]:
    """Return the median of each cell and peer with these weights.

    Medians are shares of the machine's bfloat16 limit. Empty without such peers.
    """
    key, most = SPEEDS[run.mode], limits(run)
    peers = [peer for peer in peers_of(run) if PEERS[peer].weights == weights]
    bars = {
        cell: {
            peer: median(got) / most[cell]
            for peer in peers
            if (got := values(run.rows, peer, cell, key))
        }
        for cell in cells_of(run)
    }
    return bars if peers else {}


PANELS = {
    "TTFT, p50": ("median_ttft_ms", "ms"),
    "TTFT, p99": ("p99_ttft_ms", "ms"),
    "ITL, p99": ("p99_itl_ms", "ms"),
    "throughput": ("output_throughput", "output tokens/s"),
}


def rate_panels(run: Results) -> list[ChartPanel]:
    """Return the panels of latency and throughput against the request rate."""
    rates = {rate_name(rate): rate for rate in run.asked["rates"] or ()}
    panels = []
    for title, (key, unit) in PANELS.items():
        series: Series = {
            peer: [
                (rate, median(got))
                for cell, rate in rates.items()
                if (got := values(run.rows, peer, cell, key))
            ]
            for peer in peers_of(run)
        }
        panels.append(ChartPanel(title, "requests/s", unit, series, log_y=unit == "ms"))
    return panels
