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
        ("gllm/recovery/*.py", "gllm/runtime/head/*death*.py", "gllm/runtime/head/supervisor.py"),
        ("tests/recovery", "tests/runtime/head/test_supervisor.py", "tests/simulation"),
        ("tests/runtime", "tests/commands", "tests/e2e"),
    ),
    "driver": Subject(
        ("gllm/runtime/driver/driver*.py",),
        ("tests/runtime/driver", "tests/simulation"),
        ("tests/runtime", "tests/scheduler", "tests/sim", "tests/router", "tests/observability"),
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
        ("gllm/text/grammar/**/*.py",),
        ("tests/text/grammar", "tests/text", "tests/frontend"),
        ("tests/runtime", "tests/e2e"),
    ),
    "frontend": Subject(
        ("gllm/frontend/**/*.py",),
        ("tests/frontend", "tests/clients"),
        (
            "tests/router",
            "tests/engine",
            "tests/deploy/cluster",
            "tests/deploy/manifests",
            "tests/e2e",
        ),
    ),
    "engine": Subject(
        ("gllm/engine/*.py",),
        ("tests/engine", "tests/frontend"),
        ("tests/router", "tests/clients", "tests/commands", "tests/runtime", "tests/e2e"),
    ),
    "router": Subject(
        ("gllm/router/**/*.py", "gllm/routing/**/*.py"),
        ("tests/router", "tests/routing"),
        ("tests/simulation", "tests/sim", "tests/frontend", "tests/runtime", "tests/e2e"),
    ),
    "kv_transfer": Subject(
        ("gllm/transport/kv/*.py",),
        ("tests/transport/kv",),
        ("tests/runtime", "tests/router", "tests/config", "tests/sim", "tests/e2e"),
    ),
    "link": Subject(
        ("gllm/transport/link/*.py",),
        ("tests/transport/link",),
        ("tests/transport/kv", "tests/runtime", "tests/net", "tests/experiments", "tests/e2e"),
    ),
    "sim": Subject(
        ("gllm/sim/**/*.py",),
        ("tests/sim",),
        ("tests/plan", "tests/experiments", "tests/commands", "tests/commands/profile"),
    ),
    "plan": Subject(
        ("gllm/plan/**/*.py",),
        ("tests/plan", "tests/experiments/test_hexgen2_baselines.py"),
        (
            "tests/commands",
            "tests/deploy/manifests",
            "tests/deploy/up",
            "tests/experiments",
            "tests/sim",
        ),
    ),
    "launch": Subject(
        ("gllm/deploy/up/*.py", "gllm/deploy/ray/*.py"),
        ("tests/deploy/up", "tests/deploy/ray", "tests/commands"),
        ("tests/deploy/manifests", "tests/plan", "tests/e2e"),
    ),
}

WRITTEN: dict[str, Subject] = {
    "planners": Subject(
        ("gllm/plan/**/*.py",),
        (
            "tests/plan/test_invariants.py",
            "tests/plan/hetero/test_invariants.py",
            "tests/plan/test_attainment.py",
            "tests/plan/test_engine_checks.py",
            "tests/plan/test_scaling.py",
            "tests/plan/test_pool_plan.py",
            "tests/plan/test_goodput_plan.py",
            "tests/plan/test_engine_design_search.py",
            "tests/plan/test_limited_capacity.py",
        ),
    ),
}
"""Parts with samples of faults that were written by hand: planners.json."""
