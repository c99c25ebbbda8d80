"""A shaped hop between two network namespaces: rate, delay, jitter, loss and cuts (shaper.c)."""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

SOURCE = Path(__file__).with_name("shaper.c")


def compiler() -> str | None:
    """Return the path of a C compiler; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc"))), None)


@functools.cache
def build_shaper() -> Path:
    """Compile the shaper, or return the one of an earlier call; the cache folder keeps it.

    Raises:
        RuntimeError: there is no C compiler, or it failed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gllm" / "net"
    binary = cache / f"shaper-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if binary.exists():
        return binary
    path = compiler()
    if path is None:
        raise RuntimeError("no C compiler: install gcc, or set CC")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        output = Path(folder) / "shaper"
        done = subprocess.run(
            [path, "-O2", "-Wall", "-o", str(output), str(SOURCE)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{path}: {done.stderr}")
        output.replace(binary)
    return binary


class ShapedHop:
    """A pair of TUN devices in two namespaces and the process between them.

    All settings are those of both directions. Methods may be called from any thread.
    """

    def __init__(self, namespaces: tuple[str, str], devices: tuple[str, str], seed: int = 0):
        arguments = [namespaces[0], devices[0], namespaces[1], devices[1], str(seed)]
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [str(build_shaper()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            self.close()
            raise RuntimeError(f"the shaper between {namespaces} failed")

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def set_rate(self, bits_per_second: float) -> None:
        """Limit each direction; 0 for no limit."""
        self._command(f"rate {bits_per_second:.0f}")

    def set_delay(self, seconds: float) -> None:
        """Set the one-way delay."""
        self._command(f"delay {1e9 * seconds:.0f}")

    def set_jitter(self, seconds: float) -> None:
        """Add up to so much to the delay of each packet, at random; the order is kept."""
        self._command(f"jitter {1e9 * seconds:.0f}")

    def set_queue(self, num_bytes: int) -> None:
        """Set how many bytes may wait per direction before packets are dropped."""
        self._command(f"queue {num_bytes}")

    def set_loss(self, probability: float) -> None:
        """Drop packets at random."""
        self._command(f"loss {probability}")

    def cut(self) -> None:
        """Drop all packets from now on, those under way too, without telling either side."""
        self._command("down")

    def restore(self) -> None:
        """End a cut."""
        self._command("up")

    def block_inbound(self) -> None:
        """Let nobody open TCP connections to the first namespace, as a stateful firewall does.

        Connections that it opens itself carry both directions.
        """
        self._command("block ba")

    def admit_inbound(self) -> None:
        """End `block_inbound`."""
        self._command("admit ba")

    def counters(self) -> dict[str, dict[str, int]]:
        """Return packets, bytes, lost, overflown, cut and blocked by direction (ab, ba)."""
        rows = [line.split() for line in self._command("stats")]
        return {
            row[0]: dict(zip(row[1::2], map(int, row[2::2]), strict=True)) for row in rows if row
        }

    def close(self) -> None:
        """End the process; its devices vanish."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _command(self, line: str) -> list[str]:
        """Send a command; return the lines of its answer once it is in force."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(line + "\n")
            stdin.flush()
            lines = []
            while (answer := stdout.readline().strip()) != "ok":
                if not answer:
                    raise RuntimeError(f"the shaper has ended: {self._process.poll()}")
                lines.append(answer)
            return lines
