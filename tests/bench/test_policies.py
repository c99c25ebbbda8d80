"""The benchmark of policies: its figures on a run whose figures are known."""

from benchmarks.policies import BASE, POLICIES, Evenness, evenness, table, verdict
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline, simulate
from gllm.sim.workload import make_jobs


def times(base: Evenness, factor: float) -> Evenness:
    return base._replace(
        tokens_variation=base.tokens_variation * factor,
        decodes_variation=base.decodes_variation * factor,
    )


def test_evenness_and_its_table() -> None:
    figures = {}
    for policy in POLICIES:
        scheduler = SchedulerConfig(policy=policy)
        deployment = roofline("qwen2.5-14b", "A100-40G", 2, 4096, scheduler=scheduler)
        run, _ = simulate(deployment, make_jobs("uniform:16,400,16,60", 60, 20.0))
        figures[policy] = evenness(run)
        assert figures[policy].steps == len(run.steps)
        assert figures[policy].tokens * len(run.steps) == sum(s.work.tokens for s in run.steps)
        assert figures[policy].local_variation <= figures[policy].decodes_variation
    # What the policies are for: sarathi lumps decodes, throttle does not.
    assert figures["throttle"].local_variation < figures[BASE].local_variation / 2

    outputs = {policy: {b"equal"} for policy in POLICIES}
    assert table(figures, outputs).count("| yes") == len(POLICIES)
    changed = table(figures, outputs | {"balance": {b"equal", b"other"}})
    assert [row.split()[1] for row in changed.splitlines() if "**no**" in row] == ["balance"]

    base = figures[BASE]
    met = times(base, 0.5)
    assert verdict(figures | {"throttle": met}).count("(met)") == 2
    missed = times(base, 0.51)
    assert verdict(figures | {"throttle": missed}).count("**missed**") == 2
