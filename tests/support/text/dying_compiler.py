"""The compiling process, ending over a grammar: `python -m tests.support.text.dying_compiler`.

The file that the environment variable DEATH names holds a signal's number and what the process
writes before the signal ends it. The file is removed first, so that the next process lives.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from gllm.grammar import compiler_process

FATAL = "innocent"
"""Text of the grammar that the process dies over."""

compile_grammar = compiler_process.compile_grammar


def compiled(source: list[str], tokens: Any) -> list[str]:
    """Compile a grammar; end the process instead if it is the fatal one and the file exists."""
    death = Path(os.environ["DEATH"])
    if source[1] == FATAL and death.exists():
        number, _, output = death.read_text().partition(" ")
        death.unlink()
        sys.stdout.write(output)
        sys.stdout.flush()
        os.kill(os.getpid(), int(number))
        # Another thread may be the one that the signal reaches: never answer.
        time.sleep(60)
    return compile_grammar(source, tokens)


if __name__ == "__main__":
    compiler_process.compile_grammar = compiled
    compiler_process.main()
