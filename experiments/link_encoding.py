"""Loss of the encodings of activations between machines, on the demo model.

Compares stages with encoded activations with the same stages without. Source of the limits: none
of a paper; an encoding may raise the perplexity by 0.5 %.
"""

from functools import partial
from itertools import product
from pathlib import Path

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.encoding_loss import (
    DEFAULT_SIZES,
    EncodingLoss,
    TextSizes,
    measure_encoding_loss,
)
from experiments.parallel import map_parallel
from gllm.config.link_encodings import LINK_ENCODINGS, PLAIN
from gllm.models.hub import resolve_model
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table

MODEL = "demo"
STAGES = (2, 3, 6)
"""Numbers of stages; all links between them are encoded. The demo model has six layers."""
DTYPES = ("float32", "bfloat16", "float16")
"""Formats of the activations."""
MAX_PERPLEXITY_RISE = 0.005
"""Limit of the relative rise."""
MAX_BYTE_RATIO = 0.53
"""Limit of encoded bytes, scales included, over those of activations of 16 bits per element."""
QUICK_SIZES = TextSizes(4, 64, 8, 16)


def _measure(folder: Path, sizes: TextSizes, cell: tuple[str, str, int]) -> EncodingLoss:
    """Return the loss of an encoding, for activations of a dtype and a number of stages."""
    encoding, dtype, num_stages = cell
    return measure_encoding_loss(folder, num_stages, encoding, dtype, sizes)


def run(options: ExperimentOptions) -> ExperimentResult:
    """Measure every encoding in every format."""
    folder = resolve_model(MODEL)
    sizes = QUICK_SIZES if options.quick else DEFAULT_SIZES
    dtypes, stage_counts = (DTYPES[:1], STAGES[-1:]) if options.quick else (DTYPES, STAGES)
    encodings = [each for each in LINK_ENCODINGS if each != PLAIN]
    cells = list(product(encodings, dtypes, stage_counts))
    measure = partial(_measure, folder, sizes)
    losses = dict(zip(cells, map_parallel(measure, cells, 1, options.progress), strict=True))
    rows, claims, bars = [], [], {}
    for encoding in encodings:
        for dtype in dtypes:
            for stages in stage_counts:
                loss = losses[encoding, dtype, stages]
                rows.append(
                    [
                        encoding,
                        dtype,
                        str(stages - 1),
                        f"{loss.byte_ratio:.3f}",
                        f"{loss.plain_perplexity:.4f}",
                        f"{loss.perplexity:.4f}",
                        f"{100 * loss.perplexity_rise:+.3f} %",
                        f"{100 * loss.forced_match:.2f} %",
                        f"{100 * loss.greedy_match:.2f} %",
                    ]
                )
                name = f"{encoding}, {dtype}, links encoded: {stages - 1}"
                limit = ExpectedLimit(MAX_PERPLEXITY_RISE, digits=3)
                claims.append(
                    PaperClaim(f"{name}: rise of the perplexity", limit, loss.perplexity_rise)
                )
                bars[name] = {"rise of the perplexity": 100 * loss.perplexity_rise}
        ratio = ExpectedLimit(MAX_BYTE_RATIO, unit="x", digits=3)
        claims.append(PaperClaim(f"{encoding}: bytes over 16 bits", ratio, loss.byte_ratio))
    text = (
        f"Stages of the model `{MODEL}` in one process, whose activations are encoded and decoded "
        f"on every link. {sizes.num_texts} texts of {sizes.num_tokens} tokens, sampled from the "
        "stages without encoding (temperature 1, seed 0): on these no model has a lower "
        "perplexity, but for chance. Token matches: the most likely token behind each token of "
        f"the texts, and greedy continuations of {sizes.greedy_tokens} tokens, in which one "
        "difference changes the rest of a text.\n\n"
        + format_table(
            ["encoding", "activations", "links encoded", "bytes over 16 bits", "perplexity plain",
             "encoded", "rise", "same token, texts", "same token, greedy"],
            rows,
        )
    )  # fmt: skip
    return ExperimentResult(
        "Loss of link encodings",
        text,
        claims,
        {
            "link-encoding.svg": lambda path: plot_bars(
                bars, path, "rise of the perplexity, %", "Loss of link encodings"
            )
        },
        reference="none; the limits are this project's",
    )
