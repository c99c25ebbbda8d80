"""Benchmark of weak links: its model, its limits, its load figures and its verdicts."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.cpu.page import format_sections
from benchmarks.weak_links.limits import WeakLink, most_tokens_per_second, token_floor_seconds
from benchmarks.weak_links.load import StreamedRequest, collect_figures
from benchmarks.weak_links.page import SECTIONS
from benchmarks.weak_links.simulator import (
    NUM_LONE,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    LinkedCostModel,
    RigCase,
    make_calibration,
    make_requests,
    make_windowed_links,
)
from benchmarks.weak_links.traffic import FIFO, OURS
from benchmarks.weak_model import PRINTABLE, TOKEN_BYTES, make_weak_model
from gllm.pacing.traffic import TrafficClass
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.stage_work import compute_stage_work
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop
from tests.support.engines.pipeline import Pipeline

pytestmark = pytest.mark.full

LINK = WeakLink(100, 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weak_model(tmp_path_factory.mktemp("weak"), num_layers=2, hidden_size=256)


def test_weak_model_writes_characters_that_depend_on_the_prompt(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = set()
    for word in ("owl", "fox", "hen"):
        for stages in (1, 2):
            prompt = tokenizer.encode(f"Once there was one {word} named Max").ids
            pipeline = Pipeline(model, stages)
            pipeline.add(1, prompt)
            for num_tokens in (len(prompt), *[1] * 11):
                pipeline.run([pipeline.row(1, num_tokens)])
            token_ids = pipeline.held[1].tokens[len(prompt) :]
            assert set(token_ids) <= set(PRINTABLE)
            texts.add(tokenizer.decode(token_ids))
    assert len(texts) == 3
    assert all(len(text) == 12 and len(set(text)) > 4 for text in texts)


def test_a_token_of_the_whole_model_weighs_as_much_as_in_molink(tmp_path: Path) -> None:
    spec = Pipeline(make_weak_model(tmp_path, num_layers=1)).config.model
    assert spec.hidden_size * 4 == TOKEN_BYTES == 14_336
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20e6


def test_limits_of_a_link() -> None:
    assert LINK.bytes_per_second == pytest.approx(12.5e6 * 1448 / 1500)
    assert LINK.floor_seconds(4 * TOKEN_BYTES) == pytest.approx(0.03475, rel=1e-3)
    floor = token_floor_seconds(LINK, 3, TOKEN_BYTES, 0.005)
    assert floor == pytest.approx(0.09 + 2 * LINK.sending_seconds(TOKEN_BYTES) + 0.015)
    assert most_tokens_per_second(LINK, 1, floor, TOKEN_BYTES, 250) == pytest.approx(1 / floor)
    assert most_tokens_per_second(LINK, 1000, floor, TOKEN_BYTES, 250) == pytest.approx(591.7, 1e-3)
    assert most_tokens_per_second(LINK, 1000, floor, TOKEN_BYTES, 1000) == 0


def test_only_tokens_and_prompts_of_the_window_count() -> None:
    streams = [
        StreamedRequest([1], 9, 0.0, [0.5, 1.0, 1.5, 2.5, 3.0]),
        StreamedRequest([1], 9, 0.0, [0.9, 2.9]),
    ]
    prompts = [
        StreamedRequest([1], 1, 0.9, [1.1]),
        StreamedRequest([1], 1, 1.2, [2.0]),
        StreamedRequest([1], 1, 2.0, []),
    ]
    figures = collect_figures(streams, prompts, 1.0, 3.0)
    assert (figures.seconds, figures.num_tokens) == (2.0, 4)
    assert figures.gaps == [0.5, 1.0]
    assert figures.prompt_ttfts == pytest.approx([0.8])
    assert figures.num_prompts == 2


def test_requests_of_a_seed_are_the_same_and_have_nothing_in_common() -> None:
    requests = make_requests(20, 1.5, 3)
    again = make_requests(20, 1.5, 3)
    assert [(time, each.body) for time, each in requests] == [
        (time, each.body) for time, each in again
    ]
    assert len({tuple(each.prompt[:16]) for _, each in requests}) == 20
    assert [time for time, _ in requests] == sorted(time for time, _ in requests)


def test_engines_over_fast_links_serve_most_requests_alone() -> None:
    """Steps that are timed compute alone; the largest micro-batches are beyond those of cases."""
    groups = make_calibration(32)
    assert [len(group) for group in groups[: NUM_LONE + 1]] == [1] * (NUM_LONE + 1)
    assert max(len(group) for group in groups) == 32
    lengths = [len(request.prompt) for group in groups for request in group]
    assert max(lengths) + OUTPUT_TOKENS[1] > PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]


@pytest.mark.parametrize(("setup", "is_kept_warm"), [(FIFO, False), (OURS, True)])
def test_simulated_connections_begin_slowly_and_only_lanes_keep_them_warm(
    setup: str, is_kept_warm: bool
) -> None:
    """A prompt of 300 tokens on a new connection, on a used one, and after two silent seconds."""
    loop, num_bytes = EventLoop(), 300 * TOKEN_BYTES
    link = make_windowed_links(loop, RigCase(setup, LINK), 2).activations[0]
    cost = TransferCost(LINK.sending_seconds(num_bytes), LINK.delay_seconds, num_bytes)
    seconds: list[float] = []

    def send(now: float, _: None) -> None:
        link.send(TrafficClass.PREFILL, cost, lambda at, begin: seconds.append(at - begin), now)

    for begin in (0.0, 0.75, 3.0):
        loop.push(begin, PIPELINE, send, None)
    loop.run()
    floor = LINK.floor_seconds(num_bytes)
    new, used, silent = seconds
    assert new > floor + 4 * 2 * LINK.delay_seconds
    assert used == pytest.approx(floor)
    assert silent == pytest.approx(floor if is_kept_warm else new, rel=0.01)


def test_linked_costs_are_those_of_the_bytes_and_the_delay() -> None:
    work = compute_stage_work(0, [ScheduledRow(1, 0, 0, 100, [], [], True)])
    cost = LinkedCostModel(ConstantCostModel(0.01), LINK, share=0.9)
    transfer = cost.activation_transfer(0, work)
    assert transfer.num_bytes == 100 * TOKEN_BYTES
    assert transfer.occupancy_seconds == pytest.approx(
        LINK.sending_seconds(100 * TOKEN_BYTES) / 0.9
    )
    assert transfer.propagation_seconds == 0.03
    assert cost.plan_transfer(0, work).is_free
    assert cost.plan_transfer(1, work).propagation_seconds == 0.03
    assert cost.return_transfer(work).propagation_seconds == 0.03
    assert cost.stage_seconds(0, work) == 0.01


def traffic_row(
    setup: str, mean: float, p99: float, prefill: float, drops: float
) -> dict[str, Any]:
    """A row of the section `traffic`."""
    return {
        "setup": setup,
        "congestion": "cubic",
        "megabits": 100.0,
        "delay_ms": 30.0,
        "decode_mean_ms": mean,
        "decode_p99_ms": p99,
        "decode_max_ms": p99,
        "decode_floor_ms": 35.0,
        "num_decodes": 200,
        "prefill_mean_ms": prefill,
        "prefill_floor_ms": 1218.0,
        "num_overtaken": 3,
        "num_prefills": 3,
        "drop_share": drops,
    }


def results() -> dict[str, Any]:
    """Results with all sections."""
    idle = {"congestion": "bbr", "delay_ms": 30, "interval": 0.12, "has_slow_start": True}
    engine = {"congestion": "bbr", "stages": 3, "streams": 4, "num_prompts": 4}
    engine |= {"limit_tokens_per_second": 37.0, "itl_floor_ms": 107.0, "num_prompts_answered": 3}
    engine |= {"itl_mean_ms": None, "itl_p99_ms": None, "prompt_ttft_mean_ms": 900.0}
    case = {"megabits": 60.0, "delay_ms": 30.0, "requests": 20, "ttft_rig_ms": 800.0}
    case |= {"ttft_simulated_ms": 880.0, "tpot_rig_ms": 200.0, "tpot_simulated_ms": 160.0}
    case |= {"rig_cores": 0.31, "other_cores": 0.02}
    return {
        "origins": dict.fromkeys(SECTIONS, "Made by `python -m benchmarks.weak_links`."),
        "traffic": [
            traffic_row(FIFO, 261.0, 1285.0, 1319.0, 0.0),
            traffic_row(OURS, 41.0, 116.0, 1534.0, 0.0),
            traffic_row(OURS, 45.0, 150.0, 1534.0, 0.002),
        ],
        "idle": [{**idle, "mean_ms": 33.0, "floor_ms": 31.2, "num_delays": 1.06}],
        "engines": [
            {**engine, "setup": FIFO, "tokens_per_second": 20.0},
            {**engine, "setup": OURS, "tokens_per_second": 30.0},
        ],
        "simulator": [{**case, "setup": OURS, "ttft_error": 0.1, "tpot_error": -0.2}],
    }


def test_page_names_what_is_met_and_what_is_missed() -> None:
    text = " ".join(format_sections(SECTIONS, results()).split())  # Without the padding of columns.
    assert "decode mean at most 1.29 x floor (at most 1.3: met)" in text
    assert "p99 at most 4.3 x floor (at most 4: **missed**)" in text
    assert "p99 0.10 x FIFO's (at most 0.25: met)" in text
    assert "prefill 1.16 x FIFO's (at most 1.2: met)" in text
    assert "dropped at most 0.200% of a run's packets (at most 0.1%: **missed**)" in text
    assert "at most 1.06 delays per hop (at most 1.2: met)" in text
    assert "Largest error 20.0% (at most 15%: **missed**)" in text
    assert "| +10.0% | 200 | 160 | -20.0% | 0.31 | 0.02 |" in text
    assert "| bbr | 4 | ours | 30.0 | 1.50 | 37 | - | - | 107 | 900 | 3 of 4 |" in text


def test_page_has_the_sections_that_were_measured() -> None:
    rows = results()
    del rows["engines"], rows["traffic"]
    text = format_sections(SECTIONS, rows)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Single tokens on an idle link",
        "## The simulator against the rig",
    ]
