"""The compiling process, ending over a grammar: `python -m tests.support.text.dying_compiler`.

The file that the environment variable DEATH names holds a signal's number, "once" or "always", and
what the process writes before the signal ends it. With "once" the file is removed first, so that
the next process lives.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from gllm.text.grammar import compiler_process

FATAL = "innocent"
"""Text of the grammar that the process dies over."""


def compile_or_die(source: list[str], tokens: Any) -> list[str]:
    """Compile a grammar; end the process instead if it is the fatal one and the file exists."""
    death = Path(os.environ["DEATH"])
    if source[1] == FATAL and death.exists():
        number, times, output = death.read_text().split(" ", 2)
        if times == "once":
            death.unlink()
        sys.stdout.write(output)
        sys.stdout.flush()
        os.kill(os.getpid(), int(number))
        # Another thread may be the one that the signal reaches: never answer.
        time.sleep(60)
    return compiler_process.compile_grammar(source, tokens)


if __name__ == "__main__":
    compiler_process.main(compile_or_die)
