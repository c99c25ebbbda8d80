"""The comparison on a CPU without its peers: what is asked, sent, timed and refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.cpu import compare
from benchmarks.cpu.drivers import timing
from benchmarks.cpu.environments import ENVIRONMENTS, installed_versions, is_pinned, package_of
from benchmarks.cpu.limits import Rates
from benchmarks.cpu.loads import equal_cell, rate_cell, requests_of, trace_cell
from benchmarks.cpu.model import (
    COMMON,
    DEMO,
    DENSE,
    FIRST_WORD,
    SHAPES,
    VOCABULARY,
    WEIGHT_BYTES,
    tokenizer_json,
    word,
)
from benchmarks.cpu.modes import shares_of_capacity
from benchmarks.cpu.options import CompareConfig
from benchmarks.cpu.peers import DENSE_PEERS, PEERS, Peer, Server, select_peers
from benchmarks.cpu.prepare import llama_binaries
from benchmarks.cpu.results import Results, Row
from benchmarks.cpu.serving import send_cells
from benchmarks.cpu.session import Session
from benchmarks.cpu.workplace import OURS, PeerError, Workplace, run
from gllm.models.config import read_config

pytestmark = pytest.mark.full

CONFIG = CompareConfig(streams=(1, 2), prompt=8, new=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "gllm,sglang"], "'sglang' is none of gllm, llama.cpp"),
        (["--peers", "openvino"], "openvino is not measured as a server"),
        (["--rounds", "0"], "rounds is 0, but must be at least 1"),
        (["--streams", "4,0"], "streams is 0"),
        (["--new", "1"], "new is 1, but must be at least 2"),
        (["--rates", "1,-2"], "rates are (1.0, -2.0), but must be above 0"),
        (["--mode", "docs", "--work", "/nowhere"], "has no results: measure first"),
    ],
)
def test_what_cannot_be_asked(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_peers_of_a_mode_in_the_order_of_the_table() -> None:
    assert [peer.name for peer in select_peers(("vllm", "gllm"), "server")] == [
        "gllm",
        "vllm",
    ]
    modes = ("in-process", "four-bit", "hybrid")
    in_process, four_bit, hybrid = (select_peers(None, mode) for mode in modes)
    names = [peer.name for peer in hybrid]
    assert names[:4] == list(DENSE_PEERS)
    assert names[4:] == [f"{peer}-{shape}" for shape in ("lfm2", "qwen3.5") for peer in DENSE_PEERS]
    assert [*in_process, *four_bit, *hybrid[4:]] == list(PEERS.values())
    assert {peer.weights for peer in four_bit} == {"q4_0", "q4_k_m", "int4"}
    assert select_peers(None, "server") == [peer for peer in in_process if peer.serve]
    assert {peer.environment for peer in PEERS.values()} == set(ENVIRONMENTS)


def test_hybrids_have_as_many_weights(tmp_path: Path) -> None:
    """Read per token, states included; they are less than one percent."""
    sizes = {}
    for shape, (name, options) in SHAPES.items():
        kind = {"Lfm2": "lfm2", "Qwen2": "qwen2", "Qwen3_5": "qwen3_5_text"}[name]
        raw = COMMON | options | {"architectures": [f"{name}ForCausalLM"], "model_type": kind}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = read_config(tmp_path).model
        assert model.has_state == (shape != DENSE)
        layers = sum(layer.weights_per_token(model.hidden_size) for layer in model.layers)
        sizes[shape] = layers + model.vocab_size * model.hidden_size
    assert 2 * sizes[DENSE] == WEIGHT_BYTES
    assert all(0.99 < size / sizes[DENSE] < 1.01 for size in sizes.values()), sizes


def test_words_are_tokenized_into_their_ids() -> None:
    made = tokenizer_json(json.loads((DEMO / "tokenizer.json").read_text()))
    tokenizer = Tokenizer.from_str(json.dumps(made))
    assert tokenizer.get_vocab_size() == len(made["model"]["vocab"]) == VOCABULARY
    ids = [FIRST_WORD, 77_777, VOCABULARY - 1]
    text = "".join(map(word, ids))
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.decode(ids) == text
    assert (timing.FIRST_ID, timing.LAST_ID) == (FIRST_WORD, VOCABULARY - 1)


def test_all_servers_get_the_same_words() -> None:
    cell = equal_cell(CONFIG, 2, seed=3)
    load, bodies = requests_of(cell, Server((), extra_body={"cache_prompt": False}), "m")
    same, texts = requests_of(cell, Server((), takes_ids=False, ignores_eos=False), "m")
    for ids, text in zip(map(json.loads, bodies), map(json.loads, texts), strict=True):
        assert "".join(map(word, ids["prompt"])) == text["prompt"]
        assert (ids["ignore_eos"], ids["cache_prompt"], ids["max_tokens"]) == (True, False, 4)
        assert "ignore_eos" not in text
    assert [each.prompt_tokens for each in same] == [each.prompt_tokens for each in load] == [8, 8]
    assert json.loads(bodies[0])["prompt"] != json.loads(bodies[1])["prompt"]


def test_loads_of_traces() -> None:
    at_once, _ = requests_of(trace_cell("azure-code", 0), Server(()), "m")
    assert {each.arrival for each in at_once} == {0.0}
    poisson, _ = requests_of(rate_cell(2.0, 50, 0), Server(()), "m")
    assert 10 < poisson[-1].arrival < 50
    assert max(each.prompt_tokens + each.output_tokens for each in poisson) <= 2048


def fake(*short: int) -> Peer:
    """A peer that is a fake server, whose outputs lack so many tokens."""

    def serve(work: Workplace, source: Path, port: int, slots: int) -> Server:
        return Server((sys.executable, "-m", "tests.support.http.fake_peer", port, *short))

    return Peer("fake", OURS, "bf16", lambda work, weights: work.model, serve)


def test_a_server_is_started_warmed_up_and_loaded(tmp_path: Path) -> None:
    work = Workplace(tmp_path, 2, 2**30)
    cells = [equal_cell(CONFIG, streams, 0) for streams in (2, 1, 2)]
    rows = send_cells(fake(0), work, tmp_path, 2, cells, turn=5)
    assert [(row.peer, row.cell, row.round) for row in rows] == [
        ("fake", "1 stream", 5),
        ("fake", "2 streams", 5),
    ]
    for row in rows:
        assert row.figures["output_throughput"] > 0
        assert row.pss > 2**20
        assert 0 <= row.foreign <= 1


def test_servers_that_fail(tmp_path: Path) -> None:
    work, cells = Workplace(tmp_path, 2, 2**30), [equal_cell(CONFIG, 1, 0)]
    with pytest.raises(PeerError, match=r"served \(8, 3\) prompt and output tokens where \(8, 4\)"):
        send_cells(fake(1), work, tmp_path, 1, cells, 0)
    with pytest.raises(PeerError, match=r"exited during startup: .*IndexError"):
        send_cells(fake(), work, tmp_path, 1, cells, 0)


def empty() -> Results:
    return Results("server", "2026-01-02", "compare", "2 cores", {})


def test_a_peer_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    def refuse(work: Workplace, weights: str) -> Path:
        raise PeerError("no wheel")

    peers = [
        Peer("bad", OURS, "bf16", refuse),
        *(Peer(name, OURS, "bf16", lambda work, weights: work.model) for name in ("a", "b")),
    ]
    running = Session(
        Workplace(tmp_path, 2, 1),
        peers,
        empty(),
        create_model=lambda work: None,
        measure_limits=lambda threads: Rates(threads, 1.0, 1.0),
    )
    running.prepare()
    assert running.results.refused == {"bad": "no wheel"}
    seen = []
    for turn, peer in running.rounds(3):
        seen.append((turn, peer.name))
        with running.attempt(peer):
            if len(seen) == 3:
                raise PeerError("it ended")
    # The second round is backwards; b fails in it and is left out of the third.
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a")]
    assert running.path.exists()


def test_rates_are_shares_of_the_best_other_server(tmp_path: Path) -> None:
    running = Session(Workplace(tmp_path, 2, 1), [], empty())
    for name, speed in {"gllm": 9.0, "vllm": 2.0, "llama.cpp": 1.0}.items():
        running.results.versions[name] = "1"
        figures = {"request_throughput": speed}
        running.results.rows.append(Row(name, "azure-conv / 8, 32 at once", 0, figures, 0.0))
    assert shares_of_capacity(running) == pytest.approx((0.8, 1.4, 2.0))


def test_decode_is_what_a_batch_takes_beyond_its_first_token(tmp_path: Path) -> None:
    now = 0.0

    def generate(prompts: list[list[int]], new: int) -> None:
        nonlocal now
        now += 0.01 * sum(map(len, prompts)) + 0.5 * (new - 1)

    given = timing.Task(
        model="",
        weights="bf16",
        threads=1,
        kv_bytes=1,
        batches=[1, 4],
        prompt=10,
        new=5,
        prefills=[50],
        repeats=2,
        output=str(tmp_path / "rows.json"),
    )
    timing.measure(given, generate, clock=lambda: now)
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    speeds = {each["cell"]: each["figures"]["tokens_per_second"] for each in rows}
    assert speeds == pytest.approx({"decode b=1": 2.0, "decode b=4": 8.0, "prefill 50": 100.0})


def test_environments_are_as_pinned(tmp_path: Path) -> None:
    assert package_of("transformers[serving]==5.23.0") == "transformers"
    assert is_pinned("2.13.0+cpu", "torch==2.13.0")
    assert not is_pinned("2.13.1", "torch==2.13.0")
    assert not is_pinned(None, "torch==2.13.0")
    assert installed_versions(tmp_path / "bin" / "python", ["torch"]) == {}
    assert set(installed_versions(Path(sys.executable), ["torch", "no-such-package"])) == {"torch"}


def test_reasons_of_commands_that_fail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(PeerError, match=r"failed \(3\): .*no disk"):
        run([sys.executable, "-c", "print('no disk'); exit(3)"], log)
    with pytest.raises(PeerError, match="does not run"):
        run([tmp_path / "absent"], log)
    with pytest.raises(PeerError, match="has no llama-server and no llama-batched-bench"):
        llama_binaries(Workplace(tmp_path, 2, 1, llama_bin=tmp_path))
