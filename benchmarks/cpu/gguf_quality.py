"""Measure what number formats cost on real models, and gllm beside llama.cpp on the same files.

A SmolLM2 file becomes one file per GGUF type with llama-quantize, and a Hugging Face folder per
other format. Run as `python -m benchmarks.cpu.gguf_quality TOOLS WORK SMOLLM2 [GEMMA]`: TOOLS is
the folder of llama.cpp's programs. It writes docs/benchmarks/gguf-quality.md. The scores of each
row are kept in WORK, so that a run that was stopped continues; rows are measured again once their
files there are deleted.
"""

import argparse
import datetime
import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cpu import llama_tools
from benchmarks.cpu.llama_tools import PeerScores
from benchmarks.cpu.perplexity import (
    ANSWER_TOKENS,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    SCORED,
    WINDOW,
    Scores,
    read_prose,
    score,
    share_of_same_answers,
    split_windows,
)
from benchmarks.cpu.written_formats import WRITTEN, write_floats, write_format
from benchmarks.policies import processor
from gllm.models.hub import resolve_model
from gllm.options.limits import MAX_LOGPROBS
from gllm.sim.metrics.report import format_table

ROOT = Path(__file__).parents[2]
NUM_WINDOWS = 40
"""Windows of the text that are scored by default."""
PLAIN_TYPES = (
    *("F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)
"""Types by the names of llama-quantize."""
TYPES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in PLAIN_TYPES},
    "MXFP4": ("--tensor-type", "ffn=mxfp4", "--tensor-type", "attn=mxfp4", "Q8_0"),
}
"""Arguments of llama-quantize by row."""
PUBLISHED = "SmolLM2 as published (Q4_1)"
"""Row of the SmolLM2 file itself."""
FLOATS = "F32"
"""Row that others are compared with: the floats that the SmolLM2 file stands for."""
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, float32": {"dtype": "float32", "quantization": "int4"},
    "int4, bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
    "KV cache fp8, float32": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "KV cache int8, float32": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "KV cache int8, bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
"""Engine options by format, of the file with floats."""


PREAMBLE = """# GGUF files beside llama.cpp, and number formats on a real model

Made by `python -m benchmarks.cpu.gguf_quality TOOLS WORK SMOLLM2 GEMMA`; overwritten by it.
{machine}; llama.cpp of llama-cpp-python 0.3.36, built for this processor.

Text: prose of gllm's pages (SHA-256 {digest}...), in windows of {window} tokens. Convention of
`llama-perplexity`: each window is a context of its own, BOS replaces its first token if the model
has one, and the last {scored} tokens are scored. *tokens* counts whole windows. Both engines get
the same tokens; this is checked. gllm computes in float32 (`--dtype float32`) unless a row says
otherwise, llama.cpp with its defaults: keys and values in 16 bits. Beside weights of few bits both
round activations to 8 bits, llama.cpp for K types in groups of 256. Same greedy answer: all of
{answer} tokens, to the first {prompt} tokens of each of the first {num_prompts} windows.
Log-probabilities: of gllm's {likeliest} likeliest tokens at each scored position; llama.cpp saves
them in steps of 0.00024.

Files: SmolLM2-135M-Instruct as published, in Q4_1, and Gemma 3 270M in Q4_K_M. The others are made
from the numbers of the SmolLM2 file: a real model, but rounded to 4 bits already. {floats} has
exactly these numbers; `llama-quantize` makes the other types from it. Widths of 576 are no multiple
of 256, so K types and IQ4_XS are in down projections alone, and `llama-quantize` stores the other
matrices as Q5_0, Q8_0, IQ4_NL and others."""
PEER_COLUMNS = [
    *("file", "tokens", "gllm", "llama.cpp", "difference", "its standard error"),
    *("same likeliest token", "same greedy answer", "log-probabilities differ by, mean", "at most"),
]
PEER_PREAMBLE = """## Beside llama.cpp

Aim: perplexity within 0.5 %. K types differ in the activations: llama.cpp rounds those that meet
them with a scale per 256 inputs (its Q8_K), gllm with one per 32 for all types: it rounds less."""
FORMATS_PREAMBLE = """## Formats

SmolLM2's numbers in other formats, beside F32, for the first windows that both have. The published
file has exactly the numbers of F32, so what it loses is the rounding of activations to 8 bits. GGUF
types as above. int8 and int4 are those of `--quantization`. Checkpoints are rounded to nearest,
without the calibration of AWQ's and GPTQ's own tools."""
FORMAT_COLUMNS = [
    *("numbers", "tokens", "perplexity", "beside F32", "same likeliest token"),
    "same greedy answer",
]


@dataclass(frozen=True)
class Row:
    """A model in a format and the options by which gllm serves it."""

    name: str
    model: Path
    text: Path
    options: dict[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    has_peer: bool = False
    """True if llama.cpp scores the same file."""


class Workplace:
    """Folder with models and scores."""

    def __init__(self, tools: Path, folder: Path, num_windows: int) -> None:
        """Create the folder and the text in it, unless it has them.

        Args:
            tools: folder of llama.cpp's programs.
            folder: for models and scores.
            num_windows: windows that are scored, the first ones of the text.
        """
        self.tools = tools
        self.folder = folder
        self.num_windows = num_windows
        folder.mkdir(parents=True, exist_ok=True)
        self.text = folder / "text.txt"
        if not self.text.exists():
            self.text.write_text(read_prose(ROOT / "docs"), encoding="utf-8")

    def make_types(self, source: Path) -> Iterator[Row]:
        """Yield the rows of GGUF types, written from the numbers of a file."""
        floats = self.folder / "SmolLM2-F32.gguf"
        if not floats.exists():
            llama_tools.quantize(self.tools, source, floats, ("F32",))
        yield Row(FLOATS, floats, self.text, has_peer=True)
        for name, arguments in TYPES.items():
            target = self.folder / f"SmolLM2-{name}.gguf"
            if not target.exists():
                llama_tools.quantize(self.tools, floats, target, arguments)
            yield Row(name, target, self.text, has_peer=True)

    def make_formats(self) -> Iterator[Row]:
        """Yield the rows of other formats, from the floats of `make_types`."""
        floats = self.folder / "SmolLM2-F32.gguf"
        for name, options in OPTIONS.items():
            yield Row(name, floats, self.text, options)
        plain = self.folder / "SmolLM2-safetensors"
        if not plain.exists():
            write_floats(resolve_model(str(floats)), plain)
        for name in WRITTEN:
            target = self.folder / f"SmolLM2-{name.replace(' ', '-')}"
            if not target.exists():
                write_format(plain, name, target)
            yield Row(name, target, self.text)

    def scores(self, row: Row) -> Path:
        """Return the file with gllm's scores of a row."""
        return self.folder / f"{row.name}.own.npz"

    def peer_scores(self, row: Row) -> Path:
        """Return the file with llama.cpp's scores of a row."""
        return self.folder / f"{row.name}.peer.npz"

    def measure(self, row: Row) -> None:
        """Score a row with gllm, and with llama.cpp if it reads the file; not what has been."""
        own, peer = self.scores(row), self.peer_scores(row)
        has_own = own.exists() and Scores.load(own).num_windows >= self.num_windows
        if not has_own:
            peer.unlink(missing_ok=True)
            score(row.model, self._windows(row), row.options).save(own)
        if not row.has_peer:
            return
        if not (peer.exists() and PeerScores.load(peer).num_windows >= self.num_windows):
            scores = Scores.load(own)
            windows = self._windows(row)[: scores.num_windows]
            llama_tools.score(self.tools, row.model, row.text, windows, scores).save(peer)

    def _windows(self, row: Row) -> list[list[int]]:
        folder = resolve_model(str(row.model))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = row.text.read_text(encoding="utf-8")
        tokens = tokenizer.encode(text).ids
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        bos = tokens[0] if len(tokens) > len(plain) else None
        windows = split_windows(tokens, bos)[: self.num_windows]
        if len(windows) < self.num_windows:
            raise ValueError(f"{row.text} has only {len(windows)} windows of {WINDOW} tokens")
        return windows


def compare_with_peer(work: Workplace, row: Row) -> list[str]:
    """Return the table row of a file that both engines score."""
    own, peer = Scores.load(work.scores(row)), PeerScores.load(work.peer_scores(row))
    num_windows = peer.num_windows
    ours = own.perplexity(num_windows)
    difference = np.abs(own.top_logprobs[: num_windows * SCORED] - peer.logprobs_at_top)
    per_token = own.logprobs[: num_windows * SCORED] - peer.logprobs
    per_token = per_token[~np.isnan(per_token)]
    error = per_token.std() / len(per_token) ** 0.5 if len(per_token) else np.nan
    return [
        row.name,
        f"{num_windows * WINDOW:,}",
        f"{ours:.4f}",
        f"{peer.perplexity:.4f}",
        f"{100 * (ours / peer.perplexity - 1):+.2f} %",
        "-" if np.isnan(error) else f"{100 * error:.2f} %",
        f"{peer.is_same_top.mean():.1%}",
        f"{share_of_same_answers(own.answers, peer.answers):.0%}",
        f"{np.nanmean(difference):.4f}",
        f"{np.nanmax(difference):.3f}",
    ]


def compare_with_floats(work: Workplace, row: Row) -> list[str]:
    """Return the table row of a format."""
    own, floats = (Scores.load(work.folder / f"{each}.own.npz") for each in (row.name, FLOATS))
    num_windows = min(own.num_windows, floats.num_windows)
    ours, theirs = own.perplexity(num_windows), floats.perplexity(num_windows)
    top, top_of_floats = (each.top_ids[: num_windows * SCORED, 0] for each in (own, floats))
    return [
        row.name,
        f"{num_windows * WINDOW:,}",
        f"{ours:.4f}",
        f"{100 * (ours / theirs - 1):+.2f} %",
        f"{(top == top_of_floats).mean():.1%}",
        f"{share_of_same_answers(own.answers, floats.answers):.0%}",
    ]


def format_page(work: Workplace, peers: list[Row], formats: list[Row]) -> str:
    """Format the tables of the rows that have been measured, and describe the measurement."""
    own = [row for row in peers if row.name in (PUBLISHED, FLOATS, *TYPES)] + formats
    preamble = PREAMBLE.format(
        machine=f"{processor()}, Python {platform.python_version()}, torch {version('torch')}, "
        f"{datetime.date.today()}",
        digest=hashlib.sha256(work.text.read_bytes()).hexdigest()[:12],
        window=WINDOW,
        scored=SCORED,
        num_prompts=NUM_PROMPTS,
        floats=FLOATS,
        prompt=PROMPT_TOKENS,
        answer=ANSWER_TOKENS,
        likeliest=MAX_LOGPROBS,
    )
    beside = [compare_with_peer(work, row) for row in peers if work.peer_scores(row).exists()]
    alone = [compare_with_floats(work, row) for row in own if work.scores(row).exists()]
    return "\n\n".join(
        [
            preamble,
            f"{PEER_PREAMBLE}\nLargest difference: {_largest_difference(beside)}.",
            format_table(PEER_COLUMNS, beside),
            FORMATS_PREAMBLE,
            format_table(FORMAT_COLUMNS, alone) + "\n",
        ]
    )


def _largest_difference(rows: list[list[str]]) -> str:
    """Return the largest difference in rows of `compare_with_peer`, with the row's name."""
    column = PEER_COLUMNS.index("difference")
    largest = max(rows, key=lambda row: abs(float(row[column].split()[0])))
    return f"{largest[column]}, {largest[0]}"


def main() -> None:
    """Measure the rows that are missing and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tools", type=Path, help="folder of llama-perplexity and the others")
    parser.add_argument("work", type=Path, help="folder for models and scores")
    parser.add_argument("smollm2", type=Path, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("gemma", type=Path, nargs="?", help="Gemma 3 270M as a GGUF file")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/gguf-quality.md")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    parser.add_argument("--only", nargs="+", default=[], help="rows to measure; writes no page")
    options = parser.parse_args()
    work = Workplace(options.tools, options.work, options.windows)
    files = [Row(PUBLISHED, options.smollm2, work.text, has_peer=True)]
    if options.gemma is not None:
        files.append(Row("Gemma 3 270M (Q4_K_M)", options.gemma, work.text, has_peer=True))
    peers = [*files, *work.make_types(options.smollm2)]
    formats = list(work.make_formats())
    for row in [*peers, *formats]:
        if not options.only or row.name in options.only:
            print(row.name, flush=True)
            work.measure(row)
    if not options.only:
        options.output.write_text(format_page(work, peers, formats), encoding="utf-8")


if __name__ == "__main__":
    main()
