"""Process that compiles untrusted grammars: `python -m gllm.text.grammar.compiler_process`.

A grammar can keep the compiler busy forever, exhaust memory or overflow the stack, and the compiler
cannot be interrupted from inside. It therefore runs in a process with limits, which the kernel
kills. The process reads one JSON line `[format, text]` per grammar and answers with one line
`[grammar, error]`, of which one is empty.
"""

import json
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gllm.observability.child_start import exit_on_import_error, leave_signals_to_parent

CPU_SECONDS = 2.0
"""Limit of CPU time per grammar."""
MEMORY_BYTES = 2**30
"""Limit of additional memory per grammar."""
TRIAL_TOKENS = 64
"""Length of a random walk through a new grammar, which detects most that are too complex."""
STACK_BYTES = 2**22
"""Stack size of the compiling thread: less than on the last stage, so that it overflows here."""
MAX_ERROR_CHARACTERS = 600
"""Length limit of an error message."""


def compile_grammar(source: list[str], tokens: Any) -> list[str]:
    """Compile a grammar with llguidance; return `[grammar, ""]`, or `["", error]` if it is invalid.

    Args:
        source: Format and text of a GrammarSource.
        tokens: The model's LLTokenizer.
    """
    from llguidance import LLMatcher, grammar_from

    from gllm.text.grammar.vocabulary import create_parser_limits

    kind, text = source
    try:
        grammar = grammar_from(cast(Any, kind), text)
    except ValueError as error:
        return ["", _to_message(str(error))]
    if kind in ("lark", "gbnf"):
        # Without this wrapper the text could be taken for the library's own format.
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(tokens, grammar, limits=create_parser_limits(), log_level=0)
    chance = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = _set_bits(matcher.compute_bitmask()) if not matcher.is_error() else []
        choices = [token for token in allowed if token not in tokens.eos_tokens]
        if not choices:
            break
        matcher.consume_token(chance.choice(choices))
    if matcher.is_error():
        return ["", _to_message(matcher.get_error() or "nothing fits it")]
    return [grammar, ""]


CompileFunction = Callable[[list[str], Any], list[str]]
"""Compiles a grammar as `compile_grammar`."""


def compile_or_error(
    source: list[str], tokens: Any, compile_source: CompileFunction = compile_grammar
) -> list[str]:
    """Compile a grammar; return `[grammar, ""]`, or `["", error]` also if an exception is raised.

    Args:
        source: Format and text of a GrammarSource.
        tokens: The model's LLTokenizer.
        compile_source: Compiles the grammar.
    """
    try:
        return compile_source(source, tokens)
    except MemoryError:
        return ["", f"it is too complex: compiling takes more than {MEMORY_BYTES >> 20} MiB"]
    except BaseException as error:  # A panic of the library is no Exception.
        return ["", _to_message(f"the compiler failed: {type(error).__name__}: {error}")]


def _set_bits(mask: bytes) -> list[int]:
    """Return the indices of the set bits, lowest bit of a byte first."""
    return [
        8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    ]


def _to_message(error: str) -> str:
    """Return an error message for the author of the grammar."""
    return error.replace("<non-verbose/>", "").strip()[:MAX_ERROR_CHARACTERS]


def _limit_memory() -> None:
    """Limit the memory of this process to its current size and the share of one grammar."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(folder: Path, vocab_size: int, eos_ids: list[int], compile_source: CompileFunction) -> None:
    """Compile a grammar per line of standard input and write each result to standard output.

    Args:
        folder: The model folder.
        vocab_size: Vocabulary size of the model.
        eos_ids: Tokens that end a sequence.
        compile_source: Compiles a grammar.
    """
    from gllm.text.grammar.vocabulary import load_grammar_tokenizer

    try:
        tokens = load_grammar_tokenizer(folder, vocab_size, eos_ids)
    except ValueError as error:
        _write_answer(["", str(error)])
        return
    _write_answer(["", ""])
    _limit_memory()
    for line in sys.stdin:
        # The signal's default action ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = compile_or_error(json.loads(line), tokens, compile_source)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_answer(answer)


def _write_answer(answer: list[str]) -> None:
    """Write one line to standard output."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(compile_source: CompileFunction = compile_grammar) -> None:
    """Run the process that compiles grammars; the arguments are FOLDER VOCAB_SIZE EOS_ID...

    Reads a grammar per line of standard input, as JSON, and prints the compiled grammar or an error
    per line. Exits with status 0 at the end of the input, and with IMPORT_ERROR_STATUS if its
    modules cannot be imported.
    """
    leave_signals_to_parent()
    with exit_on_import_error():
        import setproctitle

        # Used by the thread, whose errors do not end the process with a status.
        import gllm.text.grammar.vocabulary  # noqa: F401
    setproctitle.setproctitle("gllm-grammar")
    folder, vocab_size, *eos_ids = sys.argv[1:]
    threading.stack_size(STACK_BYTES)
    tokens = [int(token) for token in eos_ids]
    arguments = (Path(folder), int(vocab_size), tokens, compile_source)
    thread = threading.Thread(target=run, args=arguments)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
