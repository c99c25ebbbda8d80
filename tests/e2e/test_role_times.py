"""Times of a fleet with roles: changes of a role, and the age of the router's view of an engine."""

import threading
import time
from collections.abc import Iterator
from statistics import median

import pytest

from gllm.engine.attachment.attachment import LOAD_REPORT_SECONDS
from tests.support.servers.http_pair import BODIES, Pair, serving_pair
from tests.support.servers.server import DEADLINE

pytestmark = pytest.mark.full
FLIP_FACTOR = 30
"""A change of a role takes less time than as many times the requests that it consists of."""
MAX_AGE_REPORTS = 3
"""A router's view is not older than as many intervals between reports, and the two requests. An
interval is as long as it takes here: a sleep of a busy machine ends late."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving_pair(tmp_path_factory.mktemp("keys")) as started:
        yield started


def measure_flip(pair: Pair, name: str, role: str) -> float:
    """Change the role of an engine; return the seconds until the router shows it."""
    begin = time.monotonic()
    assert pair.router.post(f"/engines/{name}/role", {"role": role})[0] == 200
    while pair.router.rows()[name]["role"] != role:
        assert time.monotonic() < begin + DEADLINE
    return time.monotonic() - begin


def measure_requests(pair: Pair) -> float:
    """Return the seconds of two requests to the router that change nothing."""
    begin = time.monotonic()
    for _ in range(2):
        pair.router.rows()
    return time.monotonic() - begin


def test_an_idle_engine_takes_another_role_at_once(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """T7: both ways, from the command to the router's view. The paper's takes 5 to 7 ms."""
    seconds, of_requests = [], []
    for role in ("decode", "prefill") * 10:
        of_requests.append(measure_requests(pair))
        seconds.append(measure_flip(pair, "p", role))
    with capsys.disabled():
        print(
            f" [{len(seconds)} flips: median {1000 * median(seconds):.1f} ms, "
            f"greatest {1000 * max(seconds):.1f} ms; "
            f"requests alone {1000 * median(of_requests):.1f} ms] ",
            end="",
        )
    assert median(seconds) < FLIP_FACTOR * median(of_requests)


class Sleeper:
    """Sleeps for as long as an engine between two reports, again and again."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds of the longest sleep."""
        self._should_stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._should_stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._should_stop.is_set():
            begin = time.monotonic()
            time.sleep(LOAD_REPORT_SECONDS)
            self.longest = max(self.longest, time.monotonic() - begin)


def test_a_routers_view_of_a_decode_engine_is_fresh(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """T8: the load is that of others, so the router learns of it by the engine's reports alone.

    The age of a view is the time since the engine has left the number of tokens that it shows. It
    includes the two requests that find out.
    """
    body = {**BODIES["/v1/completions"], "max_tokens": 1000}
    thread = threading.Thread(target=pair.post, args=("d", "/v1/completions"), kwargs=body)
    counts: list[tuple[float, int]] = []
    ages: list[float] = []
    requests: list[float] = []
    start = pair.shown_tokens("d")
    sleeper = Sleeper()
    thread.start()
    while thread.is_alive():
        counts.append((time.monotonic(), pair.generated("d")))
        seen = pair.shown_tokens("d")
        now = time.monotonic()
        requests.append(now - counts[-1][0])
        left = [at for at, count in counts if count > seen]
        if counts[-1][1] > counts[0][1]:
            ages.append(now - left[0] if left else 0.0)
    sleeper.stop()
    with capsys.disabled():
        print(f" [age of {len(ages)} views: median {median(ages):.3f} s, ", end="")
        print(f"greatest {max(ages):.3f} s, of requests {max(requests):.3f} s] ", end="")
    assert pair.shown_tokens("d") > start
    assert len(ages) > 10
    assert max(ages) < MAX_AGE_REPORTS * sleeper.longest + max(requests)
