"""Simulated pages of gLLM judge the paper's policy, and their claims follow from their tables."""

from collections.abc import Callable

import pytest

from experiments import latency_vs_rate, scalability, sensitivity, volatility
from experiments.base import claims_table
from experiments.claims import PaperClaim
from experiments.trials import OUR_POLICY, PAPER_POLICY, SETTINGS
from scripts.claims_page import CLAIMS, FOLDER


def cells_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def split_page(name: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the cells of a page's first tables and those of its claims, with the headers."""
    text, claims = (FOLDER / f"{name}.md").read_text(encoding="utf-8").split(CLAIMS)
    return cells_of(text), cells_of(claims)


def scalability_claims(rows: list[list[str]]) -> list[PaperClaim]:
    speed: scalability.Speeds = {}
    names = ["qwen2.5-14b, L20", "qwen2.5-32b, A100-80G", "qwen2.5-14b, L20 over the network"]
    settings = dict(zip(names, scalability.SETTINGS, strict=True))
    for name, workload, policy, *values in rows:
        setting = settings[name]
        for devices, tokens in zip(scalability.DEVICES, values, strict=False):
            speed[setting, workload, policy, devices] = float(tokens)
    return scalability.make_claims(speed)


def latency_claims(rows: list[list[str]]) -> list[PaperClaim]:
    settings = {str(setting): setting for setting in SETTINGS}
    curves: latency_vs_rate.Curves = {}
    for setting, workload, rate, policy, ttft, _, _, e2el, tokens, _ in rows:
        key = latency_vs_rate.CurveKey(settings[setting], workload, policy)
        figures = {
            "ttft": {"mean": float(ttft)},
            "e2el": {"mean": float(e2el)},
            "steady_tokens_per_second": float(tokens),
        }
        curves.setdefault(key, []).append((float(rate), figures))
    return latency_vs_rate.make_claims(curves)


def volatility_claims(rows: list[list[str]]) -> list[PaperClaim]:
    return volatility.make_claims({row[0]: float(row[2]) for row in rows})


@pytest.mark.parametrize(
    "name", ["latency-vs-rate", "scalability", "slo", "sensitivity", "volatility"]
)
def test_the_paper_s_policy_is_judged_and_ours_stands_beside_it(name: str) -> None:
    header = split_page(name)[1][0]
    assert header[2:4] == [PAPER_POLICY, OUR_POLICY]


@pytest.mark.parametrize(
    ("name", "make_claims"),
    [
        ("scalability", scalability_claims),
        ("latency-vs-rate", latency_claims),
        ("volatility", volatility_claims),
    ],
)
def test_claims_follow_from_the_table(
    name: str, make_claims: Callable[[list[list[str]]], list[PaperClaim]]
) -> None:
    (_, _, *rows), printed = split_page(name)
    assert cells_of(claims_table(make_claims(rows), PAPER_POLICY))[2:] == printed[2:]


def test_a_gain_of_our_policy_alone_meets_no_claim_of_the_paper() -> None:
    setting = scalability.SETTINGS[0]
    speed = {
        (setting, "azure-conv", policy, devices): tokens * devices
        for policy, tokens in ((OUR_POLICY, 2.0), (PAPER_POLICY, 1.0), ("sarathi", 1.0))
        for devices in scalability.DEVICES
    }
    speed |= {(*key[:2], scalability.TENSOR_PARALLEL, key[3]): 1.0 for key in list(speed)}
    beside_sarathi = scalability.make_claims(speed)[0]
    assert beside_sarathi.verdict.is_met is False
    assert beside_sarathi.beside == {OUR_POLICY: "+100 %"}


def test_hyper_parameters_are_judged_under_the_paper_s_rule() -> None:
    """TTFT that rises with #T in the paper's rule meets the claim; in ours alone it does not."""
    for rising in (PAPER_POLICY, OUR_POLICY):
        results = {
            (policy, field, value): {
                "ttft": {
                    "mean": 1.0 + value * (policy == rising) * (field == "prefill_iterations")
                },
                "tpot": {"mean": 1.0},
                "e2el": {"mean": 1.0},
                "preemptions": 0,
                "steady_tokens_per_second": 1.0,
            }
            for policy in sensitivity.POLICIES
            for field, values in sensitivity.VALUES.items()
            for value in values
        }
        claims = {each.quantity: each for each in sensitivity.make_claims(results, results)}
        assert len(claims) == 6
        claim = claims["throttle-paper: #T 4 to 32, TTFT"]
        assert claim.verdict.is_met == (rising == PAPER_POLICY)
        assert claim.beside[OUR_POLICY] == ("+560 %" if rising == OUR_POLICY else "+0 %")
