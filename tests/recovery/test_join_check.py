"""Comparison of a machine that joins with the head."""

import msgspec
import pytest

from gllm.config.engine import EngineConfig
from gllm.recovery.join_check import (
    MACHINE_FIELDS,
    OWN_FIELDS,
    JoinFacts,
    apply_own_fields,
    find_differences,
)


def make_facts(model_hash="a" * 64, protocol=1, version="0.1.0", **options):
    config = EngineConfig.from_options(options.pop("model", "demo"), **options)
    return JoinFacts(protocol, version, config.model, model_hash, msgspec.json.encode(config))


def test_equal_machines():
    assert find_differences(make_facts(), make_facts()) == []


def test_every_exception_is_a_field():
    fields = msgspec.json.decode(make_facts().config).keys()
    assert fields >= MACHINE_FIELDS >= OWN_FIELDS


def test_fields_of_the_machine_may_differ():
    node = make_facts(
        model="/models/demo", threads=3, crash_folder="/tmp", device="cpu", standby_workers=1
    )
    assert find_differences(make_facts(), node) == []


@pytest.mark.parametrize(
    ("head", "node", "parts"),
    [
        ({}, {"dtype": "bfloat16"}, ("dtype is bfloat16 on the node, but auto", "--dtype auto")),
        ({"seed": 4}, {"seed": 2}, ("seed is 2 on the node, but 4", "with --seed 4")),
        ({"tensor_parallel_size": (2,)}, {}, ("1 on the node, but 2", "--tensor-parallel-size 2")),
        ({}, {"max_model_len": 64}, ("64 on the node, but not set", "remove --max-model-len")),
        ({"rebalance": True}, {}, ("--rebalance",)),
        ({}, {"rebalance": True}, ("--no-rebalance",)),
        ({}, {"max_num_seqs": 3}, ("max_num_seqs is 3", "--max-num-seqs")),
    ],
)  # fmt: skip
def test_each_field_gets_a_sentence(head, node, parts):
    (sentence,) = find_differences(make_facts(**head), make_facts(**node))
    assert all(part in sentence for part in parts), sentence


def test_several_fields_get_several_sentences():
    node = make_facts(dtype="bfloat16", max_model_len=64)
    assert len(find_differences(make_facts(), node)) == 2


def test_another_model():
    (sentence,) = find_differences(make_facts(), make_facts("b" * 64, model="/other"))
    assert "'/other', hash bbbbbbbbbbbb)" in sentence
    assert "'demo', hash aaaaaaaaaaaa)" in sentence


def test_another_version_does_not_list_fields():
    node = make_facts(version="0.2.0", dtype="bfloat16")
    (sentence,) = find_differences(make_facts(), node)
    assert "gllm 0.2.0, the head gllm 0.1.0" in sentence
    (sentence,) = find_differences(make_facts(), make_facts(protocol=2, dtype="bfloat16"))
    assert "version 2 of the protocol, the head version 1" in sentence


def test_a_machine_without_a_rank_takes_model_and_configuration_of_the_head():
    assert find_differences(make_facts(), JoinFacts(1, "0.1.0", "", "", b"")) == []


def test_configuration_that_is_no_json():
    node = JoinFacts(1, "0.1.0", "demo", "a" * 64, b"{")
    assert "cannot be read" in find_differences(make_facts(), node)[0]
    node = JoinFacts(1, "0.1.0", "demo", "a" * 64, b"[1]")
    assert "cannot be read" in find_differences(make_facts(), node)[0]
    node = JoinFacts(1, "0.1.0", "demo", "a" * 64, b'{"scheduler": 1}')
    assert "cannot be read" in find_differences(make_facts(), node)[0]


def test_own_fields_of_a_machine():
    head = make_facts(threads=2, dtype="bfloat16").config
    own = msgspec.json.encode({"threads": 5, "dtype": "float32", "device": "cpu"})
    config = msgspec.json.decode(apply_own_fields(head, own), type=EngineConfig)
    assert (config.threads, config.dtype, config.device) == (5, "bfloat16", "cpu")
    assert apply_own_fields(head, b"") == msgspec.json.encode(msgspec.json.decode(head))


@pytest.mark.parametrize(
    ("head", "own"),
    [("emulated:L20", "cpu"), ("emulated:L20", "emulated:H100"), ("cpu", "emulated")],
)
def test_the_head_decides_whether_devices_are_emulated(head: str, own: str) -> None:
    """A pipeline cannot compute on some of its machines alone."""
    config = apply_own_fields(
        make_facts(device=head).config, msgspec.json.encode({"device": own, "threads": 5})
    )
    merged = msgspec.json.decode(config, type=EngineConfig)
    assert (merged.device, merged.threads) == (head, 5)
