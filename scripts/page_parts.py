"""Replace the generated parts of a Markdown page, which are between markers."""

from collections.abc import Callable, Mapping


def replace_parts(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with current text between the markers of each part.

    Args:
        page: Text of the page. The markers of a part are `<!-- begin NAME -->` and
            `<!-- end NAME -->`, each alone on a line.
        parts: Functions that return the text of a part, which ends with a newline, by name.

    Raises:
        ValueError: The page has no markers for a part.
    """
    for name, generate in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{generate()}\n{end}{after}"
    return page
