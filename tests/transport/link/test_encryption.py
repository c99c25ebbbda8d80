"""What a relay between two machines can read: activations without TLS, nothing with it."""

import os
from contextlib import closing

import pytest

from tests.support.network.mover_processes import Mover, connect, read_step
from tests.support.network.plaintext import runs_of
from tests.support.network.proxies import Proxy

NUM_TOKENS, NUM_STEPS = 16, 8


@pytest.mark.parametrize("has_tls", [True, pytest.param(False, marks=pytest.mark.full)])
def test_only_without_tls_are_activations_readable(has_tls: bool) -> None:
    """A relay between two data movers keeps all bytes of their connection."""
    with Mover("head", has_tls) as source, Mover("other", has_tls) as target:
        proxy = Proxy(target.port)
        proxy.is_capturing = True
        with closing(proxy):
            sent, received = (
                each.ring() for each in connect(source, target, address=proxy.address)
            )
            payloads = []
            for step in range(NUM_STEPS):
                data = os.urandom(NUM_TOKENS * sent.shape.hidden_size * sent.shape.itemsize)
                begin = sent.payload(step)
                sent.memory[begin : begin + len(data)] = data
                sent.signal(step, NUM_TOKENS, "")
                assert read_step(received, step, NUM_TOKENS) == data
                payloads.append(data)
        captured = [bytes(each) for each in proxy.captured]
    assert len(captured[0]) > sum(map(len, payloads))
    plain = set().union(*map(runs_of, payloads))
    readable = plain & (runs_of(captured[0]) | runs_of(captured[1]))
    assert readable == (set() if has_tls else plain)
