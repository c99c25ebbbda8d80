"""The README says for whom gllm is, and for whom not yet, before it says how to start."""

import re

from tests.support.sources import ROOT, text_of


def test_readme_says_for_whom_gllm_is_before_the_start() -> None:
    before = text_of(ROOT / "README.md").partition("\n## Quick start\n")[0]
    start = before.partition("\ngllm is for you if\n\n")[2]
    suited, _, unsuited = start.partition("\n\nIt is not yet for you if\n\n")
    assert [len(re.findall(r"^- .*[;.]$", part, re.M)) for part in (suited, unsuited)] == [3, 3]
    for limit in ("speculative", "images", "LoRA", "disaggregation", "GPUs"):
        assert limit in unsuited
