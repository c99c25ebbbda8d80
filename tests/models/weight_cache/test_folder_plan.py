"""Which files of a folder of packed weights are removed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gllm.models.weight_cache.folder_plan import (
    MAX_WRITE_SECONDS,
    CachedFile,
    PartName,
    find_evictions,
    find_stale,
)

CURRENT = PartName("a" * 16, "b" * 16, "c" * 16, "d" * 32)
NOW = 1e9


def names() -> st.SearchStrategy[str]:
    """Names of parts of several models and versions, some still written, and of other files."""

    def digests(length: int) -> st.SearchStrategy[str]:
        return st.sampled_from("abcd").map(lambda digit: digit * length)

    parts = st.builds(PartName, digests(16), digests(16), digests(16), digests(32)).map(str)
    return parts | parts.map(lambda name: f".{name}.12ab.tmp") | st.sampled_from(["notes", ".lock"])


FILES = st.lists(
    st.builds(
        CachedFile,
        names(),
        st.integers(0, 100),
        st.floats(NOW - 2 * MAX_WRITE_SECONDS, NOW),
    ),
    unique_by=lambda file: file.name,
    max_size=12,
)


def test_names_are_read_back() -> None:
    assert PartName.parse(str(CURRENT)) == CURRENT
    for name in ("notes", f".{CURRENT}.tmp", f"{CURRENT}x", str(CURRENT).upper()):
        assert PartName.parse(name) is None


def test_files_of_another_version_and_of_changed_models_are_stale() -> None:
    kept = {
        CURRENT: "the same part",
        replace(CURRENT, variant="e" * 32): "another part",
        replace(CURRENT, source="e" * 16, content="e" * 16): "another model",
    }
    stale = {
        replace(CURRENT, version="e" * 16): "another version",
        replace(CURRENT, source="e" * 16, version="e" * 16): "another model of another version",
        replace(CURRENT, content="e" * 16): "the model before its files changed",
    }
    files = [CachedFile(str(name), 1, NOW) for name in [*kept, *stale]]
    assert find_stale(files, CURRENT, NOW) == [str(name) for name in stale]


@given(FILES)
def test_only_files_of_the_cache_that_nobody_writes_are_removed(files: list[CachedFile]) -> None:
    by_name = {file.name: file for file in files}
    for name in find_stale(files, CURRENT, NOW):
        file = by_name[name]
        assert file.is_own
        assert not file.is_unfinished or NOW - file.used_at > MAX_WRITE_SECONDS
        parsed = PartName.parse(name)
        assert parsed is None or (parsed.version, parsed.content) != ("a" * 16, "c" * 16)


@given(FILES, st.integers(0, 120), st.integers(0, 600), st.data())
def test_the_least_recently_used_files_make_room(
    files: list[CachedFile], needed: int, limit: int, data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.sampled_from([file.name for file in files]))) if files else set()
    own = {file.name: file for file in files if file.is_own}
    total = sum(file.num_bytes for file in own.values())
    removable = [file for name, file in own.items() if name not in kept and not file.is_unfinished]
    removed = find_evictions(files, kept, needed, limit)
    if removed is None:
        assert total - sum(file.num_bytes for file in removable) + needed > limit
        return
    gone = [own[name] for name in removed]
    assert set(removed) <= {file.name for file in removable}
    assert total - sum(file.num_bytes for file in gone) + needed <= limit
    # No file that was used later, and no more than necessary.
    rest = [file.used_at for file in removable if file.name not in removed]
    assert not gone or not rest or max(file.used_at for file in gone) <= min(rest)
    assert not gone or total - sum(file.num_bytes for file in gone[:-1]) + needed > limit
