"""--kv-events-config: vLLM's fields, and no address that other hosts reach by accident."""

import json
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.kv_events import KvEventsConfig, is_bound, parse_kv_events
from gllm.serve import make_parser


def parse(**fields: Any) -> KvEventsConfig:
    return parse_kv_events(json.dumps({"enable_kv_cache_events": True} | fields))


def test_vllm_s_example_is_read() -> None:
    config = parse(
        publisher="zmq",
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
        topic="kv@10.0.0.1@demo",
    )
    assert config == KvEventsConfig(
        True, "zmq", "tcp://*:5557", "tcp://*:5558", 10, 20, 30, "kv@10.0.0.1@demo"
    )
    assert parse(replay_endpoint=None, publisher=None) == KvEventsConfig(True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"enabled": true}', "no field 'enabled'; the fields are enable_kv_cache_events"),
        ('{"publisher": "kafka"}', "one of null, zmq"),
        ('{"endpoint": "tcp://host"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://host:70000"}', "tcp://HOST:PORT"),
        ('{"endpoint": "udp://host:7000"}', "tcp://HOST:PORT"),
        ('{"endpoint": 5}', "string"),
        ('{"replay_endpoint": "tcp://some.host:1"}', "has to be bound"),
        ('{"buffer_steps": -1}', "buffer_steps is -1"),
        ('{"hwm": true}', "integer"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv_events(text)


@pytest.mark.parametrize(
    ("address", "bound", "local"),
    [
        ("tcp://*:5557", True, False),
        ("tcp://0.0.0.0:5557", True, False),
        ("tcp://127.0.0.1:5557", True, True),
        ("tcp://127.8.0.1:5557", True, True),
        ("tcp://localhost:5557", True, True),
        ("tcp://[::1]:5557", True, True),
        ("tcp://[::]:5557", True, False),
        ("tcp://10.0.0.1:5557", True, False),
        ("tcp://router.example.com:5557", False, False),
        ("ipc:///tmp/events", True, True),
    ],
)
def test_addresses_of_other_hosts_need_a_trusted_network(
    address: str, bound: bool, local: bool
) -> None:
    assert is_bound(address) == bound
    config = parse(endpoint=address)
    EngineConfig(kv_events_config=config, trusted_network=True)
    EngineConfig(kv_events_config=parse(endpoint=address, enable_kv_cache_events=False))
    if local:
        EngineConfig(kv_events_config=config)
    else:
        with pytest.raises(ValueError, match="trusted_network"):
            EngineConfig(kv_events_config=config)


def test_the_replay_address_counts_too() -> None:
    config = parse(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://*:5558")
    with pytest.raises(ValueError, match=r"tcp://\*:5558"):
        EngineConfig(kv_events_config=config)


def test_the_flag_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = make_parser().parse_args(["--kv-events-config", '{"topic": "kv@a@b"}'])
    assert values.kv_events_config == KvEventsConfig(topic="kv@a@b")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--kv-events-config", "{}}"])
    assert "--kv-events-config" in capsys.readouterr().err
