"""Parts of gllm that mutants are drawn from, and the tests that are likely to find them."""

from typing import NamedTuple


class Subject(NamedTuple):
    """Sources with the folders and files of tests that run first."""

    sources: tuple[str, ...]
    """Patterns of paths from the root."""
    tests: tuple[str, ...]
    """Patterns of the tests that run first."""
    further: tuple[str, ...] = ()
    """Patterns of the tests that `run --further` adds."""


SUBJECTS: dict[str, Subject] = {
    "scheduler": Subject(
        ("gllm/scheduler/**/*.py",),
        ("tests/scheduler",),
        ("tests/sim", "tests/runtime", "tests/simulation", "tests/config", "tests/routing"),
    ),
    "recovery": Subject(
        ("gllm/cluster/*.py", "gllm/runtime/*death*.py", "gllm/runtime/recovery*.py"),
        ("tests/cluster", "tests/runtime/test_supervisor.py", "tests/simulation"),
        ("tests/runtime", "tests/commands", "tests/e2e"),
    ),
    "driver": Subject(
        ("gllm/runtime/driver*.py",),
        ("tests/runtime/test_driver*.py", "tests/runtime/test_kv*.py", "tests/simulation"),
        ("tests/runtime", "tests/scheduler", "tests/sim", "tests/fleet", "tests/observability"),
    ),
    "transport": Subject(
        ("gllm/transport/*.py",), ("tests/transport",), ("tests/runtime", "tests/models")
    ),
    "kernels in C++": Subject(
        ("gllm/kernels/native/*.cpp", "gllm/kernels/native/*.h"),
        ("tests/kernels",),
        ("tests/models", "tests/transport", "tests/runtime"),
    ),
    "kernels in Triton": Subject(
        ("gllm/kernels/triton/*.py",), ("tests/triton", "tests/kernels"), ("tests/runtime",)
    ),
    "models": Subject(("gllm/models/**/*.py",), ("tests/models",), ("tests/runtime", "tests/sim")),
    "text": Subject(
        ("gllm/text/**/*.py",),
        ("tests/text", "tests/frontend"),
        ("tests/engine", "tests/clients", "tests/runtime", "tests/e2e"),
    ),
    "grammar": Subject(
        ("gllm/grammar/**/*.py",),
        ("tests/grammar", "tests/text", "tests/frontend"),
        ("tests/runtime", "tests/e2e"),
    ),
    "frontend": Subject(
        ("gllm/frontend/**/*.py",),
        ("tests/frontend", "tests/clients"),
        ("tests/fleet", "tests/engine", "tests/platform", "tests/deploy", "tests/e2e"),
    ),
    "engine": Subject(
        ("gllm/engine/*.py",),
        ("tests/engine", "tests/frontend"),
        ("tests/fleet", "tests/clients", "tests/commands", "tests/runtime", "tests/e2e"),
    ),
    "router": Subject(
        ("gllm/fleet/**/*.py", "gllm/routing/**/*.py"),
        ("tests/fleet", "tests/routing"),
        ("tests/simulation", "tests/sim", "tests/frontend", "tests/runtime", "tests/e2e"),
    ),
    "kv_transfer": Subject(
        ("gllm/kv_transfer/*.py",),
        ("tests/kv_transfer",),
        ("tests/runtime", "tests/fleet", "tests/config", "tests/sim", "tests/e2e"),
    ),
    "link": Subject(
        ("gllm/link/*.py",),
        ("tests/link",),
        ("tests/kv_transfer", "tests/runtime", "tests/net", "tests/experiments", "tests/e2e"),
    ),
    "sim": Subject(
        ("gllm/sim/**/*.py",),
        ("tests/sim",),
        ("tests/plan", "tests/experiments", "tests/commands", "tests/profiling"),
    ),
    "plan": Subject(
        ("gllm/plan/**/*.py",),
        ("tests/plan",),
        ("tests/commands", "tests/deploy", "tests/launch", "tests/experiments", "tests/sim"),
    ),
    "launch": Subject(
        ("gllm/launch/*.py",),
        ("tests/launch", "tests/commands"),
        ("tests/deploy", "tests/plan", "tests/ray", "tests/e2e"),
    ),
}
