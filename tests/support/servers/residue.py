"""What a server, or a recovery of its workers, may leave behind."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.servers.server import Server, alive

SHARED = "/dev/shm/"


def num_descriptors(pid: int) -> int:
    """Number of open descriptors of a process, without the lock of the folder with evidence.

    The frontend has the lock from the first death on.
    """
    return sum(not path.endswith("/.lock") for path in open_files(pid))


def open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process are open at."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(entry)


def num_shared_mappings(pid: int) -> int:
    """Number of mappings of anonymous files: edges, logs, plan records."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:")


def owned_resources(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Number of descriptors and of mappings of each process."""
    return {pid: (num_descriptors(pid), num_shared_mappings(pid)) for pid in pids}


def leaks(owned: dict[int, tuple[int, int]]) -> set[int]:
    """Processes that have more descriptors or mappings than before."""
    return {
        pid
        for pid, (descriptors, mappings) in owned.items()
        if num_descriptors(pid) > descriptors or num_shared_mappings(pid) > mappings
    }


class Residue:
    """Processes of a server, and the named files of shared memory that they use.

    Files of other servers, which start and end meanwhile, are none of them. Before the server
    starts, $TMPDIR has to be an empty folder.
    """

    def __init__(self, server: Server) -> None:
        self.pids = [server.pid, *server.workers()]
        self._files: set[str] = set()
        for pid in self.pids:
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = [line.split(maxsplit=5)[-1] for line in mapped]
            self._files |= {name for name in (*names, *open_files(pid)) if name.startswith(SHARED)}

    def remains(self) -> set[str]:
        """Processes that still run and files that still exist, all in $TMPDIR included."""
        files = {file for file in self._files if Path(file).exists()}
        files |= {str(path) for path in Path(os.environ["TMPDIR"]).iterdir()}
        return files | {str(pid) for pid in self.pids if alive(pid)}
