"""Tools of llama.cpp: quantization, log-probabilities of a text, greedy answers.

They run as processes, from the folder of a native build.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Self
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from benchmarks.cpu.perplexity import (
    ANSWER_TOKENS,
    FIRST_SCORED,
    SCORED,
    WINDOW,
    Floats,
    Ints,
    Scores,
    pad_answers,
    save_arrays,
    split_prompts,
)
from benchmarks.cpu.serving import free_port

THREADS = "1"
"""Compute threads of a program, as of gllm's engine."""
POLL_SECONDS = 0.2


class LlamaToolError(Exception):
    """A tool of llama.cpp failed, or scored other tokens than gllm."""


@dataclass(frozen=True)
class PeerScores:
    """Results of llama.cpp on the windows that gllm has scored."""

    perplexity: float
    logprobs: Floats
    """[scored] of the true tokens; NaN where the tool cuts them off."""
    logprobs_at_top: Floats
    """[scored, n] of the tokens that gllm finds the likeliest; NaN where the tool cuts them off."""
    is_same_top: Ints
    """[scored] 1 where no token is likelier than gllm's likeliest."""
    answers: Ints
    """As in Scores."""

    @property
    def num_windows(self) -> int:
        """Windows that were scored."""
        return len(self.is_same_top) // SCORED

    def save(self, path: Path) -> None:
        """Write the arrays to a file."""
        save_arrays(path, self)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the arrays from a file."""
        with np.load(path) as arrays:
            content = dict(arrays)
        perplexity = float(content.pop("perplexity"))
        # Files of the first runs lack it.
        unknown = np.full(len(content["is_same_top"]), np.nan)
        return cls(perplexity, content.pop("logprobs", unknown), **content)


def quantize(tools: Path, source: Path, target: Path, arguments: tuple[str, ...]) -> None:
    """Write a file of another type; arguments: options, then the type."""
    *options, kind = arguments
    command: list[Path | str] = [tools / "llama-quantize", "--allow-requantize", *options]
    command += [source, target, kind, THREADS]
    subprocess.run(command, check=True, capture_output=True)


def score(
    tools: Path, model: Path, text: Path, windows: list[list[int]], own: Scores
) -> PeerScores:
    """Score a text and answer the beginnings of its windows with llama.cpp.

    Args:
        tools: folder of the programs.
        model: GGUF file.
        text: file with the text.
        windows: the tokens that gllm scored.
        own: scores of gllm.

    Raises:
        LlamaToolError: a program failed, or the tokens differ.
    """
    read_end, write_end = os.pipe()
    command: list[Path | str] = [
        *(tools / "llama-perplexity", "-m", model, "-f", text, "-c", str(WINDOW)),
        *("-b", str(WINDOW), "-t", THREADS, "--chunks", str(len(windows))),
        *("--no-warmup", "--save-all-logits", f"/dev/fd/{write_end}"),
    ]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[write_end]),
        open(read_end, "rb") as stream,
    ):
        os.close(write_end)
        logprobs, at_top, is_same = read_logits(stream, windows, own.top_ids)
        stream.read()
        log.seek(0)
        output = log.read().decode(errors="replace")
    estimate = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if estimate is None:
        raise LlamaToolError(f"llama-perplexity failed with {model}")
    answers = _answer(tools, model, windows)
    return PeerScores(float(estimate[1]), logprobs, at_top, is_same, answers)


def read_logits(
    stream: BinaryIO, windows: list[list[int]], top_ids: Ints
) -> tuple[Floats, Floats, Ints]:
    """Read what llama-perplexity saves: 16-bit log-probabilities of all tokens of each position.

    Args:
        stream: output of the program.
        windows: expected tokens.
        top_ids: [scored, n] tokens whose log-probabilities are returned, first the likeliest.

    Returns:
        Log-probabilities of the true tokens [scored] and of `top_ids` [scored, n], NaN where they
        are cut off, and 1 for each position at which no token is likelier than the first of
        `top_ids`, [scored].
    """
    magic, header = stream.read(8), np.frombuffer(stream.read(12), np.int32)
    if magic != b"_logits_" or header[0] != WINDOW or header[2] != len(windows):
        raise LlamaToolError(f"not the expected windows: {magic!r}, {header.tolist()}")
    vocab_size = int(header[1])
    tokens = np.frombuffer(stream.read(4 * WINDOW * len(windows)), np.int32).reshape(-1, WINDOW)
    # The first of each window may be BOS, which the tool puts there later.
    if not np.array_equal(tokens[:, 1:], np.array(windows)[:, 1:]):
        raise LlamaToolError("llama.cpp encodes the text to other tokens")
    # Scale and least log-probability, two floats, precede the codes.
    row_words = 2 * ((vocab_size + 1) // 2) + 4
    logprobs, at_top, is_same = [], [], []
    for index in range(len(windows)):
        data = stream.read(2 * SCORED * row_words)
        if len(data) < 2 * SCORED * row_words:
            raise LlamaToolError(f"llama-perplexity ended at window {index}")
        words = np.frombuffer(data, np.uint16).reshape(SCORED, row_words)
        scales = np.ascontiguousarray(words[:, :4]).view(np.float32).astype(np.float64)
        codes = words[:, 4 : 4 + vocab_size]
        ids = top_ids[index * SCORED : (index + 1) * SCORED]
        true = np.array(windows[index][FIRST_SCORED:])[:, None]
        # The true token's column comes first.
        chosen = np.take_along_axis(codes, np.concatenate((true, ids), 1), 1)
        numbers = np.where(chosen == 0, np.nan, scales[:, :1] * chosen + scales[:, 1:])
        logprobs.append(numbers[:, 0])
        at_top.append(numbers[:, 1:])
        is_same.append((chosen[:, 1] == codes.max(1)).astype(np.int64))
    return np.concatenate(logprobs), np.concatenate(at_top), np.concatenate(is_same)


def _answer(tools: Path, model: Path, windows: list[list[int]]) -> Ints:
    """Return the greedy answers to the beginnings of the windows."""
    answers = []
    with _server(tools, model) as url:
        for prompt in split_prompts(windows):
            body = {
                "prompt": prompt,
                "n_predict": ANSWER_TOKENS,
                "temperature": 0,
                "return_tokens": True,
                "cache_prompt": False,
            }
            with urlopen(f"{url}/completion", json.dumps(body).encode()) as response:
                answers.append(json.load(response)["tokens"])
    return pad_answers(answers)


@contextmanager
def _server(tools: Path, model: Path) -> Iterator[str]:
    """Run llama-server within a `with` block, and return its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command: list[Path | str] = [
        *(tools / "llama-server", "-m", model, "--port", str(port), "-t", THREADS),
        *("-c", str(2 * WINDOW), "-np", "1", "--no-warmup"),
    ]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise LlamaToolError(f"llama-server ended with {model}")
                time.sleep(POLL_SECONDS)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health") as response:
            return bool(response.status == HTTPStatus.OK)
    except URLError:
        return False
