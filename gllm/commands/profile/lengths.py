"""`gllm profile lengths`: trains a classifier of output lengths on the step logs of an engine.

A step log (`gllm serve --step-log FILE`) has the token ids of every prompt and every sampled token.
Routers and engines load the classifier with `--length-predictor FILE`. Only this command needs
scikit-learn; the file has plain numbers.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    CommitEvent,
    RestartEvent,
    StartEvent,
    StepLogEvent,
    read_step_log,
)
from gllm.options.flags import FlagParser, number_type, output_file
from gllm.routing.lengths.accuracy import BUCKET_NAMES, bucket_of
from gllm.routing.lengths.classifier import (
    MAX_COEFFICIENT,
    ClassifiedBucket,
    ClassifierPredictor,
    LengthClassifier,
)
from gllm.routing.lengths.evaluation import LoggedOutput, PredictorScore, score_predictor
from gllm.routing.lengths.features import (
    HEAD_TOKENS,
    NUM_FEATURES,
    TAIL_TOKENS,
    sparse_features,
)
from gllm.routing.lengths.registry import LENGTH_PREDICTORS, make_length_predictor
from gllm.scheduler.output_lengths import LengthQuery
from gllm.sim.metrics.report import format_table

MIN_OUTPUTS = 100
"""Fewest outputs to train on."""
NUM_QUANTILES = 8
"""Lengths that stand for a bucket."""
INVERSE_REGULARIZATION = 10.0
"""Inverse weight of the squared coefficients in the loss (C in scikit-learn)."""
MAX_ITERATIONS = 300
DIGITS = 6
"""Decimal places of a coefficient in the file."""


class _Unfinished(NamedTuple):
    """A sequence of a step log that has not ended."""

    query: LengthQuery
    stop_ids: frozenset[int]
    num_tokens: int


def read_outputs(events: Iterable[StepLogEvent]) -> list[LoggedOutput]:
    """Return the requests of a step log whose outputs ended by themselves, in order of their ends.

    Outputs that were aborted, as those that end at a stop string, are left out, and so are requests
    for one token and the prefills of requests that another engine decodes.

    Args:
        events: Events of the log.
    """
    outputs: list[LoggedOutput] = []
    running: dict[int, _Unfinished] = {}
    num_warm_ups = 0
    for event in events:
        match event:
            case StartEvent() | RestartEvent():
                running.clear()
                num_warm_ups = event.warm_ups
            case AddEvent() if num_warm_ups:
                num_warm_ups -= 1
            case AddEvent() if event.max_tokens > 1 and not event.kv_ticket:
                query = LengthQuery(len(event.prompt), event.max_tokens, _shorten(event.prompt))
                for index in range(event.n):
                    num_tokens = len(event.outputs[index]) if event.outputs else 0
                    stop_ids = frozenset(event.stop_ids)
                    running[event.seq + index] = _Unfinished(query, stop_ids, num_tokens)
            case AbortEvent(seqs=seqs):
                for seq in seqs:
                    running.pop(seq, None)
            case CommitEvent(result=result):
                for sampled in result.sampled_tokens:
                    sequence = running.get(sampled.seq)
                    if sequence is None:
                        continue
                    if sampled.error:
                        del running[sampled.seq]
                        continue
                    for token_id in (sampled.token_id, *sampled.further_token_ids):
                        sequence = sequence._replace(num_tokens=sequence.num_tokens + 1)
                        running[sampled.seq] = sequence
                        is_full = sequence.num_tokens == sequence.query.max_tokens
                        if is_full or token_id in sequence.stop_ids:
                            outputs.append(LoggedOutput(sequence.query, sequence.num_tokens))
                            del running[sampled.seq]
                            break
            case _:
                pass
    return outputs


def _shorten(prompt: list[int]) -> list[int]:
    """Return a prompt without the tokens between those that predictors read."""
    if len(prompt) <= HEAD_TOKENS + TAIL_TOKENS:
        return prompt
    return prompt[:HEAD_TOKENS] + prompt[-TAIL_TOKENS:]


def train_classifier(outputs: Sequence[LoggedOutput], model: str) -> LengthClassifier:
    """Return a classifier that was fitted to outputs.

    A multinomial logistic regression on hashed features predicts the bucket of an output.

    Args:
        outputs: Requests and the lengths of their outputs, at least one.
        model: Name of the model that generated them.

    Raises:
        ModuleNotFoundError: scikit-learn is missing; the message says how to install it.
    """
    classes = np.array([bucket_of(output.num_output_tokens) for output in outputs])
    present = sorted(set(classes.tolist()))
    weights, intercepts = np.zeros((len(present), NUM_FEATURES)), np.zeros(len(present))
    if len(present) > 1:
        weights, intercepts = _fit(outputs, classes)
    buckets = []
    for row, index in enumerate(present):
        lengths = [each.num_output_tokens for each in outputs if bucket_of(each[1]) == index]
        shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        clipped = np.clip(weights[row], -MAX_COEFFICIENT, MAX_COEFFICIENT)
        buckets.append(
            ClassifiedBucket(
                np.quantile(lengths, shares).tolist(),
                round(float(intercepts[row]), DIGITS),
                [round(value, DIGITS) for value in clipped.tolist()],
            )
        )
    return LengthClassifier("gllm-length-classifier", 1, model, len(outputs), buckets)


def _fit(outputs: Sequence[LoggedOutput], classes: Any) -> tuple[Any, Any]:
    """Return coefficients [classes, features] and intercepts [classes]."""
    try:
        linear_model: Any = importlib.import_module("sklearn.linear_model")
        sparse: Any = importlib.import_module("scipy.sparse")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "gllm profile lengths needs scikit-learn: pip install '.[sim]' in gllm's checkout",
            name=error.name,
        ) from error
    rows = [sparse_features(output.query) for output in outputs]
    indices = np.concatenate([indices for indices, _ in rows])
    values = np.concatenate([values for _, values in rows])
    starts = np.cumsum([0, *(len(indices) for indices, _ in rows)])
    features = sparse.csr_array((values, indices, starts), shape=(len(rows), NUM_FEATURES))
    regression = linear_model.LogisticRegression(
        C=INVERSE_REGULARIZATION, max_iter=MAX_ITERATIONS
    ).fit(features, classes)
    weights, intercepts = regression.coef_, regression.intercept_
    if len(weights) == 1:
        # Of two classes scikit-learn has the coefficients of the second alone.
        weights = np.concatenate([np.zeros_like(weights), weights])
        intercepts = np.array([0.0, intercepts[0]])
    return weights, intercepts


def compare_predictors(
    outputs: Sequence[LoggedOutput], num_before: int, model: str
) -> dict[str, PredictorScore]:
    """Return the score of every predictor on the later outputs, after it has seen those before.

    Args:
        outputs: Requests and the lengths of their outputs, in order.
        num_before: Outputs that are only learned from.
        model: Name of the model that generated them.
    """
    scores = {
        name: score_predictor(make_length_predictor(name), outputs, num_before)
        for name in LENGTH_PREDICTORS
    }
    classifier = ClassifierPredictor(train_classifier(outputs[:num_before], model))
    return {**scores, "classifier": score_predictor(classifier, outputs, num_before)}


def format_scores(scores: dict[str, PredictorScore]) -> str:
    """Return a Markdown table of scores, and one of the right predictions per bucket."""
    columns = ["predictor", "right bucket", "within one", "light or heavy", "sum expected / actual"]
    rows = [
        [name, *(f"{100 * share:.1f} %" for share in score[:3]), f"{score.total_ratio:.2f}"]
        for name, score in scores.items()
    ]
    per_bucket = []
    for index, bucket in enumerate(BUCKET_NAMES):
        counts = [score.accuracy.rows()[index] for score in scores.values()]
        if counts[0].num_outputs:
            shares = [f"{100 * row.num_right / row.num_outputs:.0f} %" for row in counts]
            per_bucket.append([bucket, str(counts[0].num_outputs), *shares])
    return "\n\n".join(
        [
            format_table(columns, rows),
            format_table(["output tokens", "outputs", *scores], per_bucket),
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm profile lengths`."""
    parser = FlagParser(prog="gllm profile lengths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("logs", nargs="+", metavar="LOG", help="step log of an engine")
    parser.add_argument(
        "--output", default="lengths.json", help="file to write (default lengths.json)"
    )
    parser.add_argument(
        "--test-share",
        type=number_type(float, gt=0, le=0.9),
        default=0.2,
        help="share of the outputs, the last ones, by which the predictors are compared before the "
        "classifier is trained on all (default 0.2)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Train a classifier on step logs, print its accuracy beside the others', and write it.

    Returns:
        The exit status: 2 for logs that cannot be read or have too few outputs.
    """
    values = make_parser().parse_args(argv)
    try:
        output_file(values.output)
        outputs, model = [], ""
        for log in values.logs:
            events = list(read_step_log(log))
            outputs += read_outputs(events)
            if events and isinstance(events[0], StartEvent):
                model = events[0].model
        if len(outputs) < MIN_OUTPUTS:
            raise ValueError(
                f"the logs have {len(outputs)} outputs that ended by themselves, and at least "
                f"{MIN_OUTPUTS} are needed: serve more requests with --step-log"
            )
        num_before = max(1, min(len(outputs) - 1, round(len(outputs) * (1 - values.test_share))))
        print(format_scores(compare_predictors(outputs, num_before, model)))
        classifier = train_classifier(outputs, model)
        Path(values.output).write_bytes(msgspec.json.encode(classifier) + b"\n")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"gllm profile lengths: {error}", file=sys.stderr)
        return 2
    print(
        f"\ntrained on {len(outputs)} outputs; wrote {values.output}; next: gllm router "
        f"--length-predictor {values.output}"
    )
    return 0
