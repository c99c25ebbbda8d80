"""Commands whose output nobody reads any more, as in `gllm simulate | head -1`, end quietly."""

import os
import subprocess
import sys

import pytest

CODE = "import sys; from gllm.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["simulate", "--help"], ["simulate", "--requests", "4"]]
)
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
