"""Process that compiles untrusted grammars: `python -m gllm.grammar.compiler_process`.

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
from pathlib import Path
from typing import Any, cast

import setproctitle

CPU_SECONDS = 2.0
"""What one grammar may take."""
MEMORY = 2**30
"""Bytes that one grammar may take."""
TRIAL_TOKENS = 64
"""Tokens of a random walk through a new grammar: much that is too complex shows there."""
STACK = 2**22
"""Bytes of the compiling thread's stack; less than on the last stage, so that it overflows here."""
MAX_ERROR = 600
"""Characters of an error."""


def compile_grammar(source: list[str], tokens: Any) -> list[str]:
    """[grammar, ""], or ["", why not]."""
    from llguidance import LLMatcher, grammar_from

    from gllm.grammar.vocabulary import parser_limits

    kind, text = source
    try:
        grammar = grammar_from(cast(Any, kind), text)
    except ValueError as error:
        return ["", _shown(str(error))]
    if kind in ("lark", "gbnf"):
        # Bare, it could as well be the library's own format.
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(tokens, grammar, limits=parser_limits(), log_level=0)
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
        return ["", _shown(matcher.get_error() or "nothing fits it")]
    return [grammar, ""]


def compile_or_error(source: list[str], tokens: Any) -> list[str]:
    """Return `compiled`, an error in its place where that raises: it would raise again."""
    try:
        return compile_grammar(source, tokens)
    except MemoryError:
        return ["", f"it is too complex: compiling takes more than {MEMORY >> 20} MiB"]
    except BaseException as error:  # A panic of the library is no Exception.
        return ["", _shown(f"the compiler failed: {type(error).__name__}: {error}")]


def _set_bits(mask: bytes) -> list[int]:
    """Indices of the bits that are set, lowest bit of a byte first."""
    return [
        8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    ]


def _shown(error: str) -> str:
    """An error for whoever wrote the grammar."""
    return error.replace("<non-verbose/>", "").strip()[:MAX_ERROR]


def _bound_memory() -> None:
    """What the process has now, and one grammar's share."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(folder: Path, vocab_size: int, eos_ids: list[int]) -> None:
    """Answer line by line until there are no more."""
    from gllm.grammar.vocabulary import load_grammar_tokenizer

    try:
        tokens = load_grammar_tokenizer(folder, vocab_size, eos_ids)
    except ValueError as error:
        _say(["", str(error)])
        return
    _say(["", ""])
    _bound_memory()
    for line in sys.stdin:
        # The signal's default action: nothing within has to notice.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = compile_or_error(json.loads(line), tokens)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer)


def _say(answer: list[str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry of the process: FOLDER VOCABULARY EOS..."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act upon.
    setproctitle.setproctitle("gllm-grammar")
    folder, vocab_size, *eos_ids = sys.argv[1:]
    threading.stack_size(STACK)
    work = (Path(folder), int(vocab_size), [int(token) for token in eos_ids])
    thread = threading.Thread(target=serve, args=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
