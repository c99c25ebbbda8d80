"""docs/planning.md: its plans can be served, and it has every field and emitter."""

import re
from pathlib import Path

import msgspec

from gllm.plan.emit.registry import EMITTERS
from gllm.plan.processes import LaunchOptions, commands_for
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
    read_plan,
)

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
STRUCTS = (
    ServingPlan, NodePlan, LinkPlan, StagePlan, EnginePlan, RouterPlan, LatencyGoals,
    ExpectedFigures,
)  # fmt: skip


def test_examples_can_be_served(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    for text in examples:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        plan = read_plan(path)
        for node in plan.nodes:
            assert commands_for(plan, node, LaunchOptions("secret", 4))


def test_every_field_is_described() -> None:
    section = PAGE.partition("## Fields of plan.yaml")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    fields = {field.name for struct in STRUCTS for field in msgspec.structs.fields(struct)}
    assert fields - words == set()


def test_every_emitter_is_described() -> None:
    section = PAGE.partition("## Manifests for cluster managers")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(EMITTERS)
