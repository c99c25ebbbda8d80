"""Order of the files of this folder."""

from tests.e2e.conftest import FOLDER, LONGEST


def test_the_longest_files_exist() -> None:
    """A name without a file would change nothing, and its tests would run last."""
    assert set(LONGEST) <= {file.stem for file in FOLDER.rglob("test_*.py")}
    assert len(set(LONGEST)) == len(LONGEST)
