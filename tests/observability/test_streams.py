"""Standard streams that are closed, full or without a reader end no process."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from tqdm import tqdm
from gllm.observability.logs import LogConfig, configure_logging
from gllm.observability.streams import protect_standard_streams
import logging
protect_standard_streams()
protect_standard_streams()
configure_logging(LogConfig("info"))
for index in tqdm(range(3)):
    logging.getLogger("gllm").info("line %d", index)
print("x" * 100, file=sys.stderr, flush=True)
for descriptor in (0, 1, 2):
    os.fstat(descriptor)
child = [sys.executable, "-c", "import os; [os.fstat(number) for number in (0, 1, 2)]"]
import subprocess
assert subprocess.run(child).returncode == 0
os._exit(7)
"""


@pytest.mark.parametrize(
    "streams",
    [
        "0<&- 1>&- 2>&-",
        "2>/dev/full",
        "2> >(exec true)",
        *(pytest.param(streams, marks=pytest.mark.full) for streams in ("2>&-", "1>&- 2>&-", "")),
    ],
)
def test_a_process_goes_on_without_standard_error(streams: str) -> None:
    command = f'"$0" -c "$1" {streams}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
