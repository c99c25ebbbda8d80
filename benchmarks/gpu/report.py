"""Results: figures derived from the ceilings, targets, the table, the page and the JSON schema.

This module needs no torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import FAILED, OK, SKIPPED, Row

BEGIN, END = "<!-- figures, overwritten by the command -->", "<!-- end of figures -->"
COPY, MATRIX = "device copy", "bf16 matrix product"

FIGURES = {
    "ms": "median milliseconds on the device; for transformers by wall clock",
    "wall_ms": "median wall-clock milliseconds of a step",
    "host_ms": "milliseconds of the host to build a step and to enqueue it",
    "bytes": "minimum bytes to move",
    "flops": "floating-point operations; a multiplication and an addition count as two",
    "gb_per_s": "bytes / ms, in 10^9 per second",
    "tflop_per_s": "flops / ms, in 10^12 per second",
    "limit_ms": "the slower of bytes / measured bandwidth and flops / measured matrix rate",
    "share": "limit_ms / ms",
    "copy_share": "bytes per second as a share of the measured bandwidth",
    "matrix_share": "flops per second as a share of the measured matrix rate",
    "weight_bytes": "bytes of the weights that a step reads",
    "weights_share": "(weight bytes / measured bandwidth) / ms",
    "error": "the largest difference from the reference, of operations as a share of its largest "
    "number",
    "tolerance": "maximum error",
    "sdpa_ms": "milliseconds of torch's scaled_dot_product_attention",
    "flash_attn_ms": "milliseconds of flash-attn",
    "torch_ms": "milliseconds of torch's own operation",
    "busy": "share of a decode run in which the device computed",
    "graphs": "number of recorded decode graphs",
    "steps": "number of measured decode steps",
    "tokens_per_s": "tokens per second by wall clock; for prefill by device time",
    "positions": "number of positions in the text",
    "excluded": "positions where the reference's two largest logits are too close",
    "included": "share of positions that are not excluded",
    "mismatched": "positions, or texts, that differ",
    "noise": "the largest difference of transformers in bfloat16 from transformers in float32",
    "texts": "number of compared texts",
}
"""Description of each figure of a row; rows.NOT_FINITE replaces non-finite values."""

SCHEMA: dict[str, Any] = {
    "date": str,
    "command": str,
    "dry_run": bool,
    "budget_seconds": float,
    "seconds": float,
    "device": {
        "name": str,
        "driver": str,
        "architecture": str,
        "memory": int,
        "l2": int,
        "processors": int,
    },
    "versions": dict.fromkeys(
        (
            "python",
            "cuda",
            "torch",
            "triton",
            "transformers",
            "numpy",
            "safetensors",
            "flash-attn",
            "msgspec",
        ),
        str,
    ),
    "ceilings": {"bytes_per_second": float, "flops_per_second": float},
    "rows": [
        {
            "section": str,
            "name": str,
            "status": str,
            "note": str,
            "traceback": str,
            "seconds": float,
            "figures": dict,
            "aims": [{"figure": str, "at_least": float, "measured": float, "met": bool}],
        }
    ],
    "summary": {OK: int, FAILED: int, SKIPPED: int, "aims_met": int, "aims_missed": int},
}
"""Keys and types of the JSON file; a list has the schema of its items."""


def results_of(
    rows: Sequence[Row], environment: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON object: the run's own keys (date, command, ...), its device, and all rows."""
    ceilings = ceilings_of(rows)
    row_objects = [_row_object(row, ceilings) for row in rows]
    aims = [aim for row in row_objects for aim in row["aims"]]
    summary = {
        status: sum(row.status == status for row in rows) for status in (OK, FAILED, SKIPPED)
    }
    met = sum(aim["met"] for aim in aims)
    summary |= {"aims_met": met, "aims_missed": len(aims) - met}
    empty = {"device": _empty(SCHEMA["device"]), "versions": _empty(SCHEMA["versions"])}
    return {
        **run,
        **empty,
        **environment,
        "ceilings": ceilings,
        "rows": row_objects,
        "summary": summary,
    }


def _empty(schema: Mapping[str, type]) -> dict[str, Any]:
    return {key: kind() for key, kind in schema.items()}


def ceilings_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return both rates per second; 0 for a rate that was not measured."""
    figures_by_row = {row.name: row.figures for row in rows if row.section == "ceilings"}
    rates = (("bytes_per_second", COPY, "bytes"), ("flops_per_second", MATRIX, "flops"))
    return {
        name: 1000 * figures_by_row[row][key] / figures_by_row[row]["ms"]
        if figures_by_row.get(row)
        else 0.0
        for name, row, key in rates
    }


def derived(figures: Mapping[str, float], ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return a row's figures and those derived from them and the ceilings."""
    result = dict(figures)
    ms = result.get("ms", 0.0)
    if ms <= 0:
        return result
    limits = []
    for amount, rate, unit, size, share in (
        ("bytes", "bytes_per_second", "gb_per_s", 1e9, "copy_share"),
        ("flops", "flops_per_second", "tflop_per_s", 1e12, "matrix_share"),
    ):
        if not result.get(amount):
            continue
        result[unit] = result[amount] / (ms / 1000) / size
        if ceilings[rate]:
            limits.append(1000 * result[amount] / ceilings[rate])
            result[share] = limits[-1] / ms
    if limits:
        result["limit_ms"] = max(limits)
        result["share"] = result["limit_ms"] / ms
    if "weight_bytes" in result and ceilings["bytes_per_second"]:
        result["weights_share"] = 1000 * result["weight_bytes"] / ceilings["bytes_per_second"] / ms
    return result


def _row_object(row: Row, ceilings: Mapping[str, float]) -> dict[str, Any]:
    figures = derived(row.figures, ceilings)
    aims = [
        {
            "figure": name,
            "at_least": least,
            "measured": figures[name],
            "met": figures[name] >= least and row.status == OK,
        }
        for name, least in row.aims.items()
        if name in figures
    ]
    return {
        "section": row.section,
        "name": row.name,
        "status": row.status,
        "note": row.note,
        "traceback": row.traceback,
        "seconds": row.seconds,
        "figures": figures,
        "aims": aims,
    }


def complaints(results: Any, schema: Any = SCHEMA, path: str = "results") -> list[str]:
    """Return a message for each place where the results do not match the schema."""
    if isinstance(schema, list):
        if not isinstance(results, list):
            return [f"{path} is no list"]
        each = enumerate(results)
        return [c for i, item in each for c in complaints(item, schema[0], f"{path}[{i}]")]
    if isinstance(schema, dict):
        if not isinstance(results, dict) or set(results) != set(schema):
            return [f"{path} has to have the keys {sorted(schema)}"]
        return [c for key in schema for c in complaints(results[key], schema[key], f"{path}.{key}")]
    if schema is dict:
        return [
            f"{path}.{key} is no known figure, or no number"
            for key, value in results.items()
            if key not in FIGURES or isinstance(value, bool) or not isinstance(value, int | float)
        ]
    types = (int, float) if schema is float else schema
    return [] if isinstance(results, types) else [f"{path} is no {schema.__name__}"]


RIVALS = {"sdpa_ms": "SDPA", "flash_attn_ms": "flash-attn", "torch_ms": "torch"}
HEADER = [
    "row",
    "ms",
    "limit, ms",
    "share",
    "tokens/s",
    "error / tolerance",
    "others, ms",
    "aims",
    "status",
]


def show(figure: float | None) -> str:
    """Format a figure in four significant digits; None becomes an empty string."""
    if figure is None:
        return ""
    return f"{figure:.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table.

    gllm.sim.metrics.report has another function, but it imports packages that may be missing.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(results: Mapping[str, Any]) -> str:
    """Format the table: one line per row."""
    return text_table(HEADER, [_line(row) for row in results["rows"]])


def _line(row: Mapping[str, Any]) -> list[str]:
    figures = row["figures"]
    shown = {name: show(figures.get(name)) for name in ("limit_ms", "share", "tokens_per_s")}
    error = ""
    if "error" in figures:
        error = f"{figures['error']:.2g} / {figures['tolerance']:.2g}"
    others = [f"{name} {show(figures[key])}" for key, name in RIVALS.items() if key in figures]
    if "excluded" in figures:
        others.append(f"{figures['excluded']:.0f} of {figures['positions']:.0f} excluded")
    aims = [
        f"{aim['figure']} {show(aim['measured'])} of {aim['at_least']:g}: "
        + ("met" if aim["met"] else "missed")
        for aim in row["aims"]
    ]
    ms = show(figures["ms"]) if "ms" in figures else show(figures.get("wall_ms"))
    if "wall_ms" in figures:
        ms = f"{ms} (wall {show(figures['wall_ms'])})" if "ms" in figures else f"wall {ms}"
    note = row["note"].replace("|", "/").split("\n")[0][:160]
    status = f"{row['status']}: {note}" if note else row["status"]
    cells = [f"{row['section']}: {row['name']}", ms, *shown.values(), error]
    return [*cells, ", ".join(others), ", ".join(aims), status]


def head(results: Mapping[str, Any]) -> str:
    """Format the device, the versions and the ceilings."""
    device, versions, ceilings = results["device"], results["versions"], results["ceilings"]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    parts = (
        device["name"],
        device["architecture"],
        device["driver"] and "driver " + device["driver"],
    )
    summary = results["summary"]
    dry = "A dry run on the CPU: its times say nothing. " if results["dry_run"] else ""
    return (
        f"{dry}Made by `{results['command']}`, {results['date']}, {results['seconds']:.0f} s. "
        f"{', '.join(part for part in parts if part)}; {there}. Measured ceilings: "
        f"{show(ceilings['bytes_per_second'] / 1e9)} GB/s copied (read + written), "
        f"{show(ceilings['flops_per_second'] / 1e12)} TFLOP/s of bf16 products. "
        f"{summary[OK]} rows ok, {summary[FAILED]} failed, {summary[SKIPPED]} skipped; "
        f"{summary['aims_met']} aims met, {summary['aims_missed']} missed."
    )


def write_page(path: Path, results: Mapping[str, Any]) -> None:
    """Write the table between the page's marks; keep the rest of an existing page."""
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# GPU\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    figures = f"{head(results)}\n\n{table(results)}"
    path.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
