"""Announcements of an engine, and the flags of its attachment."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.engine.attachment.attachment import EngineAnnouncer
from gllm.engine.interface import ModelInfo
from gllm.messages.fleet import AnnounceEngine
from gllm.models.hub import DEMO
from gllm.models.identity import hash_model
from gllm.options.flags import FlagParser, add_flags, config_from_flags
from gllm.runtime.head.supervisor import Supervisor

MODEL = ModelInfo("demo", 256, 300, (0,), {}, 0)
CONFIG = EngineConfig("demo", max_model_len=256)


def announce(
    num_blocks: int = 100,
    num_state_slots: int = 0,
    numerics: str = "cpu",
    config: EngineConfig = CONFIG,
    endpoint: bytes = b"",
    **options: Any,
) -> AnnounceEngine:
    supervisor = SimpleNamespace(
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        numerics=numerics,
        planner=SimpleNamespace(layers=[range(2), range(2, 4)]),
        kv_mover=SimpleNamespace(
            endpoint=endpoint,
            bytes_per_token=96 if endpoint else 0,
            digest="numbers" if endpoint else "",
        ),
    )
    attachment = AttachmentConfig(**options)
    return EngineAnnouncer(cast(Supervisor, supervisor), MODEL, DEMO, config, attachment)()


def test_facts_of_an_engine() -> None:
    facts = announce(name="east", role="prefill")
    assert (facts.name, facts.role, facts.model) == ("east", "prefill", "demo")
    assert (facts.max_model_len, facts.vocab_size, facts.num_stages) == (256, 300, 2)
    assert (facts.block_size, facts.num_blocks, facts.max_num_seqs) == (16, 100, 256)
    assert facts.max_num_batched_tokens > CONFIG.scheduler.max_prefill_tokens
    assert facts.model_hash == hash_model(DEMO)


def test_an_engine_with_transfers_announces_their_endpoint() -> None:
    facts = announce(endpoint=b"here")
    assert (facts.kv_endpoint, facts.kv_bytes_per_token) == (b"here", 96)
    assert facts.kv_digest == "numbers"
    facts = announce()
    assert (facts.kv_endpoint, facts.kv_bytes_per_token, facts.kv_digest) == (b"", 0, "")


def test_limits_that_were_set() -> None:
    scheduler = replace(CONFIG.scheduler, max_num_seqs=3, max_num_batched_tokens=77)
    facts = announce(config=replace(CONFIG, scheduler=scheduler))
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (3, 77)


def test_starts_and_kernels_differ() -> None:
    first, second, other = announce(name="a"), announce(name="a"), announce(numerics="cuda")
    assert first.run != second.run
    assert first.numerics == second.numerics != other.numerics
    assert first.model_hash == other.model_hash
    # Before the weights are loaded there are no blocks.
    assert announce(num_blocks=0).num_blocks == 0
    # Two state slots for each sequence of a model with recurrent layers.
    assert announce(num_state_slots=20).max_num_seqs == 10


def parse(*arguments: str) -> AttachmentConfig:
    parser = FlagParser()
    add_flags(parser, AttachmentConfig)
    config = config_from_flags(AttachmentConfig, parser.parse_args(list(arguments)))
    assert isinstance(config, AttachmentConfig)
    return config


def test_flags() -> None:
    assert not parse().is_used
    config = parse("--router", "a:1, dns:b:2,", "--role", "decode", "--name", "x")
    assert (config.router, config.role, config.name) == (("a:1", "dns:b:2"), "decode", "x")
    assert config.is_used
    assert parse("--hub", "29701").is_used


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_that_cannot_be_shown(name: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        AttachmentConfig(name=name)
