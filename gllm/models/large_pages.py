"""Large pages for the packed weights of a stage.

A decode reads all weights once. With pages of 4 KB the processor looks up an address for each of
them, in a virtual machine through two page tables, and reads at half the speed of the memory. The
kernel moves weights to pages of 2 MB in place, so that loading takes no second copy.
"""

import ctypes
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gllm.models.ranks import Ranks
from gllm.models.weight_cache.part_codec import MemorySpan, NotEncodableError, encode_part

log = logging.getLogger(__name__)

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1 and later, which Python's mmap does not name."""
MIN_SHARE = 0.5
"""Share of a large page that weights must take: the rest may be unused memory."""


def use_large_pages(parts: Iterable[object], ranks: Ranks) -> int:
    """Move the weights of a stage in host memory to large pages, where the system has them.

    Addresses stay. Weights that are already there, are mapped from files, or lie scattered stay
    where they are, as do all weights of a system without large pages.

    Args:
        parts: modules, or tuples of them.
        ranks: ranks of the modules.

    Returns:
        Bytes of memory that are in large pages now.
    """
    return move_pages(find_weight_pages(parts, ranks))


def find_weight_pages(parts: Iterable[object], ranks: Ranks) -> list[int]:
    """Return the pages to move, as `find_large_pages`; none without large pages.

    For the arguments see `use_large_pages`. Nothing may compute with the modules meanwhile.
    """
    page_bytes = _page_bytes()
    if page_bytes is None:
        return []
    spans: list[MemorySpan] = []
    for part in parts:
        try:
            spans += encode_part(part, ranks).spans
        except NotEncodableError as error:
            log.debug("a part of the model stays in small pages: %s", error)
    return find_large_pages(spans, page_bytes)


def move_pages(pages: Sequence[int]) -> int:
    """Move memory to large pages; return how many bytes are in large pages now.

    It takes seconds where free memory is in small pieces. Other threads may read and write the
    memory meanwhile. Pages that are not mapped any more are left out.

    Args:
        pages: from `find_weight_pages`.
    """
    page_bytes = _page_bytes()
    if page_bytes is None or not pages:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    moved = sum(advise(page * page_bytes, page_bytes, COLLAPSE) == 0 for page in pages)
    size = page_bytes >> 10
    log.info("%d of %d pages of weights are large (%d KiB)", moved, len(pages), size)
    return moved * page_bytes


def find_large_pages(spans: Iterable[MemorySpan], page_bytes: int) -> list[int]:
    """Return the numbers of the pages of a size of which memory takes enough, in ascending order.

    Args:
        spans: memory; spans that overlap count once for each.
        page_bytes: size of a page; page n begins at address n * page_bytes.
    """
    taken: dict[int, int] = {}
    for span in spans:
        begin, end = span.address, span.address + span.num_bytes
        for page in range(begin // page_bytes, -(-end // page_bytes)):
            first, last = page * page_bytes, (page + 1) * page_bytes
            taken[page] = taken.get(page, 0) + min(end, last) - max(begin, first)
    return sorted(page for page, count in taken.items() if count >= MIN_SHARE * page_bytes)


def _page_bytes() -> int | None:
    """Return the size of large pages; None if the system has or permits none."""
    if sys.platform != "linux":
        return None
    try:
        if "[never]" in (SETTINGS / "enabled").read_text():
            return None
        return int((SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None
