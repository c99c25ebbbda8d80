"""Network namespaces named after the process that owns them, so that leftovers are recognized."""

import ctypes
import functools
import itertools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMESPACES = Path("/run/netns")
TUN = Path("/dev/net/tun")
PREFIX = "gllm-net"
NAME = re.compile(rf"{PREFIX}-(\d+)-\d+-\w+")
CLONE_NEWNET = 0x40000000
"""Flag of setns: the descriptor is a network namespace."""

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def run_ip(*arguments: str) -> str:
    """Run `ip ARGUMENTS`; return its output.

    Raises:
        RuntimeError: the command failed; the message is its error output.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unsupported_reason() -> str | None:
    """Return why this machine cannot have network namespaces with TUN devices; None if it can."""
    if os.geteuid():
        return "network namespaces need root"
    if not TUN.exists():
        return f"{TUN} does not exist"
    name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}-probe"
    try:
        run_ip("netns", "add", name)
        run_ip("-n", name, "tuntap", "add", "tun0", "mode", "tun")
    except (RuntimeError, FileNotFoundError) as error:
        return f"network namespaces do not work here: {error}"
    finally:
        with suppress(RuntimeError, FileNotFoundError):
            delete_namespace(name)
    return None


def make_namespaces(*suffixes: str) -> list[str]:
    """Create namespaces of this process with a loopback device; return their names."""
    remove_stale_namespaces()
    number = next(_numbers)
    names = [f"{PREFIX}-{os.getpid()}-{number}-{suffix}" for suffix in suffixes]
    for name in names:
        run_ip("netns", "add", name)
        run_ip("-n", name, "link", "set", "lo", "up")
    return names


def delete_namespace(name: str) -> None:
    """Kill the processes in a namespace and delete it."""
    for pid in pids_in(name):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run_ip("netns", "delete", name)


def pids_in(name: str) -> list[int]:
    """Return the processes that run in a namespace, without those of which only a thread does."""
    return [int(pid) for pid in run_ip("netns", "pids", name).split() if int(pid) != os.getpid()]


def remove_stale_namespaces() -> None:
    """Delete the namespaces of processes that have ended, with all processes in them."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        match = NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with suppress(RuntimeError):  # Another process may delete it too.
                delete_namespace(path.name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Let the calling thread be in a namespace: sockets that it creates belong to it for good.

    Threads and processes that it starts meanwhile stay in it. Code inside must not await.
    """
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(NAMESPACES / name)
        try:
            yield
        finally:
            _set_namespace(own)
    finally:
        os.close(own)


def _enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
