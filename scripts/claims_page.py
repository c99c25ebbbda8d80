"""Write experiments/pages/claims.md, the claims of all experiment pages by system: met or missed.

python -m scripts.claims_page
"""

from dataclasses import dataclass
from pathlib import Path

from gllm.sim.metrics.report import format_table

FOLDER = Path(__file__).parents[1] / "experiments" / "pages"
PAGE = FOLDER / "claims.md"
SYSTEMS = (
    "gLLM",
    "MoLink",
    "HexGen-2",
    "DistServe",
    "Vidur",
    "Aladdin",
    "Splitwise",
    "TetriInfer",
)
"""Names in the references of the pages."""
OWN = "own aims and limits"
"""In place of a system where no paper states a claim."""
CLAIMS, REFERENCE = "\n## Beside what is claimed\n", "Paper: "
COUNTS = ("claims", "met", "missed", "not judged")
HEAD = """# Claims of the papers: met, missed, not judged

Made by `python -m scripts.claims_page` from the last table of each page, which
[one rule](README.md#claims) judges. *Not judged*: the paper has no number, or a run that the claim
needs was invalid. Several pages judge a claim of gLLM in several ways: simulated, on emulated
devices and on this machine.

"""


@dataclass(frozen=True)
class PageClaims:
    """Claims of one page."""

    page: Path
    system: str
    rows: list[list[str]]
    """Cells of the table of claims: quantity, claimed and measured figure first, verdict last."""

    def count(self, *verdicts: str) -> int:
        """Return the number of claims with one of some verdicts."""
        return sum(row[-1] in verdicts for row in self.rows)

    @property
    def counts(self) -> list[int]:
        """Numbers of claims: all, met, missed, not judged."""
        met, missed = self.count("yes"), self.count("**miss**")
        return [len(self.rows), met, missed, len(self.rows) - met - missed]

    @property
    def link(self) -> str:
        """Link to the table."""
        return f"[{self.page.stem}]({self.page.name}#beside-what-is-claimed)"


def read_claims(page: Path) -> PageClaims | None:
    """Return the claims of a page; None if it has none."""
    _, found, text = page.read_text(encoding="utf-8").partition(CLAIMS)
    if not found:
        return None
    lines = text.splitlines()
    reference = next(line for line in lines if line.startswith(REFERENCE))
    system = next((name for name in SYSTEMS if name in reference), OWN)
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return PageClaims(page, system, [[cell.strip() for cell in row] for row in table[2:]])


def page() -> str:
    """Return experiments/pages/claims.md."""
    pages = [each for path in sorted(FOLDER.glob("*.md")) if (each := read_claims(path))]
    systems = {name: [each for each in pages if each.system == name] for name in (*SYSTEMS, OWN)}
    totals = [[name, *_total(its_pages)] for name, its_pages in systems.items()]
    totals.append(["all", *_total(pages)])
    rows = [[each.link, each.system, *_total([each])] for each in pages]
    tables = [format_table(["system", *COUNTS], totals)]
    tables.append(format_table(["page", "system", *COUNTS], rows))
    for name, its_pages in systems.items():
        missed = [
            [*row[:3], each.link]
            for each in its_pages
            for row in each.rows
            if row[-1] == "**miss**"
        ]
        if missed:
            table = format_table(["claim", "claimed", "measured", "page"], missed)
            tables.append(f"## Missed: {name}\n\n{table}")
    return HEAD + "\n\n".join(tables) + "\n"


def _total(pages: list[PageClaims]) -> list[str]:
    return [str(sum(counts)) for counts in zip(*(page.counts for page in pages), strict=True)]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
