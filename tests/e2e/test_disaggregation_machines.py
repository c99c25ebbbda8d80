"""One engine prefills, and one on another machine decodes: the KV blocks travel over TLS."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.net.rig import unsupported_reason
from tests.support.servers.kv_machines import Machines, running_machines
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]
BODY = {"prompt": "The owl said " * 20, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
THETA = 300
PROMPTS = {"transfer": [300 + number for number in range(THETA - 20)], "push": [*range(300, 1100)]}
"""By the time at which their KV, 3 KiB per token, travels: after the prefill, or during it."""
SLOW_LINK = 4e6
"""Bits per second, at which the KV takes 1.7 s and 5 s."""
SLOW_STEPS = ("--debug-step-seconds", "0.1", "--prefill-batch-tokens", "64")
"""The longer prompt takes 1.3 s."""
PUSHES = ("--kv-push", "layer", "--kv-push-threshold", str(THETA))


def test_blocks_travel_between_machines(tmp_path: Path) -> None:
    with running_machines(tmp_path, "distserve") as machines:
        status, answer = machines.servers["router"].post(COMPLETIONS, BODY)
        assert status == 200, answer
        decode = machines.stats("D")
        assert decode["fetched_tokens"] == answer["usage"]["prompt_tokens"]
        assert decode["failed_fetches"] == 0
        assert answer["choices"] == machines.complete("P", BODY)


def complete_across_cut(
    machines: Machines, body: dict[str, Any], moment: str, is_short: bool
) -> Any:
    """Cut the link of D while it fetches; return the choices of the request."""
    hop = machines.rig.hop(1)
    hop.set_rate(SLOW_LINK)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(machines.complete, "router", body)
        wait_until(lambda: machines.stats("D")["fetching"])
        assert bool(machines.stats("P")["held_blocks"]) == (moment == "transfer")
        hop.cut()
        if is_short:
            time.sleep(1)
        else:
            wait_until(lambda: machines.rows().keys() == {"P"})
            load.result()
        hop.set_rate(0)
        hop.restore()
        return load.result()


def test_a_cut_link_changes_no_text(tmp_path: Path) -> None:
    """S9: a cut of one second, and one until the router has lost D, so that P goes on."""
    flags = *SLOW_STEPS, *PUSHES
    with running_machines(tmp_path, "tetri", *flags, shaped=(1,)) as machines:
        for (moment, prompt), is_short in product(PROMPTS.items(), (True, False)):
            body = {**BODY, "prompt": prompt}
            expected = machines.complete("P", body)
            assert machines.servers["router"].post("/reset_prefix_cache", {})[0] == 200
            before = machines.stats("D")
            answer = complete_across_cut(machines, body, moment, is_short)
            assert answer == expected, (moment, is_short)
            machines.wait_until_ready()
            machines.wait_until_empty()
            if is_short:
                after = machines.stats("D")
                assert after["fetched_tokens"] - before["fetched_tokens"] == len(prompt)
                assert after["prefill_tokens"] == before["prefill_tokens"]
