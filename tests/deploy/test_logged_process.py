"""Children of this process: their lines, their ends and the causes of these."""

import os
import signal
import sys

from gllm.deploy.logged_process import LoggedProcess


async def run(script: str, *, is_ended: bool = False) -> tuple[list[str], str, LoggedProcess]:
    """The lines of a script, the cause of its end, and its process."""
    lines: list[str] = []
    child = LoggedProcess(lines.append)
    if is_ended:
        child.end(0.0)
    child.start([sys.executable, "-S", "-c", script], os.environ, has_own_group=True)
    return lines, await child.wait(), child


async def test_lines_are_forwarded_and_the_last_one_is_the_cause() -> None:
    script = "import sys; print('one'); print('x' * 100_000); print('two', flush=True); sys.exit(3)"
    lines, cause, child = await run(script)
    # The line that is too long is dropped, its end may be a line of its own.
    assert (lines[0], lines[-1]) == ("one", "two")
    assert all(len(line) < 100_000 for line in lines)
    assert cause == "it exited with 3: two"
    assert child.status == 3


async def test_a_process_that_is_ended_before_its_start_does_not_stay() -> None:
    _, cause, child = await run("import time; time.sleep(60)", is_ended=True)
    assert cause == "it was killed by SIGTERM"
    assert child.end_signal is signal.SIGTERM


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    script = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
    child = LoggedProcess(lambda line: child.end(0.0), kill_seconds=0.05)
    child.start([sys.executable, "-S", "-c", script], os.environ)
    assert await child.wait() == "it was killed by SIGKILL"
