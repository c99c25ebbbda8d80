"""Operator profiles: measurements of single operators, and the forests that are fitted to them.

Reads tables in the format of Vidur's and defines the features and the measured range of each
operator. `forest.py` adds operators up to the time of a step.

Source of the method: "Vidur", MLSys'24, arXiv 2405.05465.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gllm.sim.costs.base import make_range_error
from gllm.sim.costs.operator_tables import VIDUR_TABLES, OperatorTables
from gllm.sim.data_tables import TableRow

Array = NDArray[np.float64]

NUM_TREES = 100
MAX_TREE_DEPTH = 16

NORM = "input_layernorm"
TOKEN_OPS = (
    "emb",
    NORM,
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "other",
)
"""Operators whose time depends on the number of token rows alone. `other` is the time of a layer
that its operators alone do not take, which may be negative; Vidur did not measure it."""
HEAD = "lm_head"
"""Final norm and LM head, by sampled rows; Vidur did not measure them."""

ATTENTION = ("a100", "meta-llama/Llama-2-70b-hf", 2)
"""Device, model and tensor parallel size of the only attention profile there is."""


@dataclass(frozen=True)
class OperatorSamples:
    """Measured times of one operator in milliseconds, and the inputs for which it was measured."""

    operator: str
    features: Array
    """Inputs for which times were measured, [samples, features]."""
    milliseconds: Array
    """Measured times, [samples]; means over repeated inputs."""
    measures: Mapping[str, Callable[[Array], Array]]
    """Functions from features [rows, features] to quantities [rows] that have to be within the
    measured range, by name."""

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest measured value of each quantity of `measures`, both inclusive."""
        values = {name: of(self.features) for name, of in self.measures.items()}
        return {name: (float(v.min()), float(v.max())) for name, v in values.items()}


class OperatorForest:
    """Random forest that predicts an operator's time; CostRangeError outside of its measured range.

    Args:
        samples: Measurements to which the forest is fitted.
    """

    def __init__(self, samples: OperatorSamples) -> None:
        """Fit. Raises ModuleNotFoundError, saying what to install, without scikit-learn."""
        self.operator = samples.operator
        self.ranges = samples.ranges
        self._measures = samples.measures
        self._model = make_regressor(NUM_TREES)
        self._model.fit(samples.features, samples.milliseconds)

    def predict(self, features: Array) -> Array:
        """Return the milliseconds [rows] for features [rows, features].

        Raises CostRangeError for a key out of the measured range: a tree would answer with its
        outermost leaf.
        """
        for name, of in self._measures.items():
            low, high = self.ranges[name]
            values = of(features)
            wrong = values[(values < low) | (values > high)]
            if wrong.size:
                raise make_range_error(self.operator, name, float(wrong[0]), low, high)
        return np.asarray(self._model.predict(features), np.float64)


def token_samples(
    device: str, model: str, tp: int, tables: OperatorTables = VIDUR_TABLES
) -> dict[str, OperatorSamples]:
    """Return the measured times of each operator of a layer but attention, by number of tokens.

    `emb` is the embedding, `attn_pre_proj` and `attn_post_proj` are the QKV and O projections,
    `add` is one residual addition. Operators that the model lacks are left out.

    Args:
        device: Device in the tables, such as a100.
        model: Model in the tables, such as meta-llama/Llama-2-70b-hf.
        tp: Tensor parallel size; times are those of one rank.
        tables: Measured operator times; default: those of Vidur.

    Raises:
        ValueError: The device, model or tensor parallel size was not profiled.
    """
    rows = _selected(tables, "token_ops", device=device, model=model, tp=tp)
    samples = {}
    for operator in (*TOKEN_OPS, HEAD):
        measured = [
            ((float(row["num_tokens"]),), float(row[f"{operator}_ms"]))
            for row in rows
            if row.get(f"{operator}_ms")
        ]
        if measured:
            samples[operator] = _samples(operator, measured, _by_tokens)
    return samples


def prefill_samples(
    tables: OperatorTables = VIDUR_TABLES, tp: int = ATTENTION[2]
) -> OperatorSamples:
    """Return the measured attention times of single prefill chunks of one layer.

    The features are [kv, chunk^2], with kv the tokens cached before the chunk. No sequence was
    longer than 4,096 tokens.

    Args:
        tables: Measured operator times; default: those of Vidur.
        tp: Tensor parallel size; times are those of one rank.
    """
    measured = [
        ((float(row["kv_cache"]), float(row["prefill_chunk"]) ** 2), float(row["attn_prefill_ms"]))
        for row in _attention_rows(tables, tp)
        if row["attn_prefill_ms"]
    ]
    measures: dict[str, Callable[[Array], Array]] = {
        "kv": lambda features: features[:, 0],
        "chunk": lambda features: np.sqrt(features[:, 1]),
        "kv + chunk": lambda features: features[:, 0] + np.sqrt(features[:, 1]),
    }
    return _samples("attn_prefill", measured, measures)


def decode_samples(
    tables: OperatorTables = VIDUR_TABLES, tp: int = ATTENTION[2]
) -> OperatorSamples:
    """Return the measured attention times of decode batches of one layer.

    The features are [batch size, mean cached tokens].

    Args:
        tables: Measured operator times; default: those of Vidur.
        tp: Tensor parallel size; times are those of one rank.
    """
    measured = [
        ((float(row["batch_size"]), float(row["kv_cache"])), float(row["attn_decode_ms"]))
        for row in _attention_rows(tables, tp)
        if row["attn_decode_ms"]
    ]
    measures: dict[str, Callable[[Array], Array]] = {
        "batch": lambda features: features[:, 0],
        "mean kv": lambda features: features[:, 1],
    }
    return _samples("attn_decode", measured, measures)


def reshape_samples(
    tables: OperatorTables = VIDUR_TABLES, tp: int = ATTENTION[2]
) -> OperatorSamples:
    """Return the measured times of the tensor reshapes around attention, by number of tokens.

    They do not depend on the number of cached tokens, so times for all numbers are averaged.

    Args:
        tables: Measured operator times; default: those of Vidur.
        tp: Tensor parallel size; times are those of one rank.
    """
    measured = []
    for row in _attention_rows(tables, tp):
        tokens = row["prefill_chunk"] if row["attn_prefill_ms"] else row["batch_size"]
        time = float(row["attn_input_reshape_ms"]) + float(row["attn_output_reshape_ms"])
        measured.append(((float(tokens),), time))
    return _samples("attn_reshape", measured, _by_tokens)


def collective_samples(
    node: str,
    collective: str,
    num_workers: int,
    devices_per_node: int,
    tables: OperatorTables = VIDUR_TABLES,
) -> OperatorSamples:
    """Return the measured times of a collective operation between GPUs, by message size in bytes.

    Args:
        node: Node type in the tables, such as a100_dgx.
        collective: all_reduce or send_recv.
        num_workers: Number of GPUs that take part.
        devices_per_node: Number of these GPUs in each node.
        tables: Measured operator times; default: those of Vidur.

    Raises:
        ValueError: The combination was not profiled.
    """
    rows = _selected(
        tables,
        "collectives",
        node=node,
        collective=collective,
        num_workers=num_workers,
        devices_per_node=devices_per_node,
    )
    measured = [((float(row["bytes"]),), float(row["median_ms"])) for row in rows]
    return _samples(collective, measured, {"bytes": lambda features: features[:, 0]})


def read_host_times(
    device: str, model: str, tables: OperatorTables = VIDUR_TABLES
) -> list[dict[str, float]]:
    """Return the measured host (CPU) times of an engine's steps in milliseconds.

    Args:
        device: Device in the tables, such as a100.
        model: Model in the tables, such as meta-llama/Llama-2-70b-hf.
        tables: Measured operator times; default: those of Vidur.

    Returns:
        One row per tensor parallel size (`tp`) and batch size (`batch_size`), with a column of
        milliseconds for each part of the host's work.

    Raises:
        ValueError: The device and model were not profiled.
    """
    rows = _selected(tables, "cpu_overheads", device=device, model=model)
    return [{k: float(v) for k, v in row.items() if k not in ("device", "model")} for row in rows]


def model_shape(model: str, tables: OperatorTables = VIDUR_TABLES) -> dict[str, int]:
    """Return the sizes of a profiled model by name, such as `num_layers`; flags are 0 or 1.

    Args:
        model: Model in the tables, such as meta-llama/Llama-2-70b-hf.
        tables: Measured operator times; default: those of Vidur.

    Raises:
        ValueError: The model was not profiled.
    """
    (row,) = _selected(tables, "model_shapes", model=model)
    flags = {"true": 1, "false": 0}
    return {k: flags[v] if v in flags else int(v) for k, v in row.items() if k != "model"}


def list_profiled_models(
    tables: OperatorTables = VIDUR_TABLES,
) -> list[tuple[str, str, int]]:
    """Return each (device, model, tensor parallel size) whose operators were profiled.

    Attention times are not needed for an entry.
    """
    rows = tables.read("token_ops")
    return sorted({(row["device"], row["model"], int(row["tp"])) for row in rows})


_by_tokens: dict[str, Callable[[Array], Array]] = {"num_tokens": lambda features: features[:, 0]}


def _samples(
    operator: str,
    measured: Iterable[tuple[tuple[float, ...], float]],
    measures: Mapping[str, Callable[[Array], Array]],
) -> OperatorSamples:
    """Repeats of a key averaged, keys in order. Raises ValueError without measurements."""
    by_key: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for key, time in measured:
        by_key[key].append(time)
    if not by_key:
        raise ValueError(
            f"the operator profile has no measurements of {operator}: measure it again with "
            "`gllm profile --operators`"
        )
    keys = sorted(by_key)
    times = np.array([np.mean(by_key[key]) for key in keys])
    return OperatorSamples(operator, np.array(keys), times, measures)


def _attention_rows(tables: OperatorTables, tp: int) -> list[TableRow]:
    """Return the attention table of a tensor parallel size; Vidur's has one size and no column."""
    rows = tables.read("attention")
    return [row for row in rows if row.get("tp", str(tp)) == str(tp)]


def _selected(tables: OperatorTables, name: str, **wanted: str | int) -> list[TableRow]:
    """Return the rows with these values.

    Raises:
        ValueError: No row has them; the message names the available values.
    """
    table = tables.read(name)
    rows = [row for row in table if all(row[k] == str(v) for k, v in wanted.items())]
    if not rows:
        known = sorted({tuple(row[k] for k in wanted) for row in table})
        raise ValueError(
            f"{tables.file_name(name)} has no rows for {_listed(list(map(str, wanted.values())))} "
            f"({_listed(list(wanted))}): choose from {'; '.join(map(_listed, known))}"
        )
    return rows


def _listed(values: Sequence[str]) -> str:
    return ", ".join(values)


def make_regressor(num_trees: int) -> Any:
    """Return an unfitted random forest of scikit-learn, which is imported at the first call.

    Args:
        num_trees: Number of trees.
    """
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the forest cost model needs scikit-learn: pip install '.[sim]' in gllm's checkout",
            name=error.name,
        ) from error
    return ensemble.RandomForestRegressor(
        n_estimators=num_trees, max_depth=MAX_TREE_DEPTH, random_state=0, n_jobs=1
    )
