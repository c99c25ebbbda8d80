"""Checks of this machine: kernel, limits, shared memory, the secret file and the launcher."""

import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gllm.config.node_environment import read_node_rank
from gllm.config.nodes import NodesConfig
from gllm.deploy.doctor.finding import Finding, bad, good, note
from gllm.options.addresses import format_host_port
from gllm.runtime.messaging.security import SecretFile, SecretFileError

MIN_DESCRIPTORS = 4096
"""Descriptors that a busy head may need: requests, workers, edges and sessions."""
MIN_SHARED_BYTES = 512 * 2**20
"""Size of /dev/shm that NCCL needs for the GPUs of one machine."""
CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
SLOW_START_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
KERNEL_CALLS = ("memfd_create", "pidfd_open", "eventfd")
"""System calls that gllm needs, by their names in module os."""


def check_platform(calls: Sequence[str] = KERNEL_CALLS) -> Finding:
    """Check the versions of Python and Linux, and that the system calls that gllm uses work.

    Args:
        calls: names of the system calls.
    """
    topic = "Python and kernel"
    version = platform.python_version()
    if sys.platform != "linux":
        return bad(topic, f"{sys.platform} is not Linux", "use Linux, or WSL2 on Windows")
    missing = [name for name in calls if not _works(name)]
    if missing:
        return bad(
            topic,
            f"Python {version} on Linux {platform.release()} lacks {', '.join(missing)}",
            "use Linux 5.3 or newer and a container runtime whose seccomp profile allows these "
            "calls, such as Docker 20.10 or newer",
        )
    return good(topic, f"Python {version}, Linux {platform.release()}")


def _works(name: str) -> bool:
    """Return True if a system call that returns a descriptor succeeds."""
    arguments: dict[str, tuple[object, ...]] = {
        "memfd_create": ("gllm-doctor",),
        "pidfd_open": (os.getpid(),),
        "eventfd": (0,),
    }
    try:
        descriptor = getattr(os, name)(*arguments.get(name, ()))
    except (AttributeError, OSError):
        return False
    os.close(descriptor)
    return True


def check_descriptors(limits: tuple[int, int] | None = None) -> Finding:
    """Check the limit of open files of this process.

    Args:
        limits: soft and hard limit; None to read them from the kernel.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        return bad(
            "open files",
            f"the hard limit is {text}, but a head may need {MIN_DESCRIPTORS}",
            "run `ulimit -n 65536` as root before gllm, or set LimitNOFILE=65536 in its unit, or "
            "`docker run --ulimit nofile=65536`",
        )
    return good("open files", f"the hard limit is {text}")


def check_shared_memory(
    num_gpus: int, folder: Path = Path("/dev/shm"), min_bytes: int = MIN_SHARED_BYTES
) -> Finding:
    """Check the free space of /dev/shm, which NCCL uses between the GPUs of a machine.

    Args:
        num_gpus: number of GPUs of this machine; up to one needs no space.
        folder: mount point of the shared memory.
        min_bytes: free space that several GPUs need.
    """
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return judge_shared_memory(num_gpus, 0, f"{folder}: {error.strerror}", min_bytes)
    size = status.f_bavail * status.f_frsize
    text = f"{size / 2**20:.0f} MiB are free in {folder}"
    return judge_shared_memory(num_gpus, size, text, min_bytes)


def judge_shared_memory(
    num_gpus: int, num_bytes: int, text: str, min_bytes: int = MIN_SHARED_BYTES
) -> Finding:
    """Compare the free space of /dev/shm with the space that NCCL needs.

    Args:
        num_gpus: number of GPUs of the machine or container; up to one needs no space.
        num_bytes: free space.
        text: description of the free space.
        min_bytes: free space that several GPUs need.
    """
    if num_bytes >= min_bytes:
        return good("shared memory", text)
    fix = "run the container with `--shm-size=1g`, or `mount -o remount,size=1g /dev/shm`"
    if num_gpus > 1:
        return bad("shared memory", f"{text}, too little for NCCL between GPUs", fix)
    return note("shared memory", f"{text}; only NCCL between several GPUs needs more")


def check_congestion_control(name: str | None, path: Path = CONGESTION_CONTROLS) -> Finding | None:
    """Check that the kernel offers the TCP congestion control of `--link-congestion`.

    Args:
        name: configured congestion control; without one, None is returned.
        path: kernel file with the available ones.
    """
    if name is None:
        return None
    available: list[str] = []
    with suppress(OSError):
        available = path.read_text().split()
    if name in available:
        return good("congestion control", f"{name} is available")
    return bad(
        "congestion control",
        f"the kernel has {', '.join(available) or 'no list'}, but not {name} (--link-congestion)",
        f"run `sudo modprobe tcp_{name}`, or leave --link-congestion out",
    )


def check_slow_start(congestion: str | None, path: Path = SLOW_START_AFTER_IDLE) -> Finding | None:
    """Check the kernel setting for TCP slow start after idle; return None if it cannot be read.

    Args:
        congestion: congestion control of the data connections; None for the system's default.
        path: kernel file of the setting.
    """
    topic = "slow start after idle"
    try:
        is_on = path.read_text().strip() != "0"
    except OSError:
        return None
    if not is_on:
        return good(topic, "off: a data connection keeps its rate while it is idle")
    if congestion == "bbr":
        return good(topic, "on, but bbr keeps its rate while a connection is idle")
    return note(
        topic,
        "on: after a pause TCP sends the first tokens to another machine at a lower rate",
        "run `sudo sysctl net.ipv4.tcp_slow_start_after_idle=0`, or pass --link-congestion bbr",
    )


def check_secret(path: str | None) -> Finding | None:
    """Check the file with the secret that nodes share, and its mode; None without a file."""
    if path is None:
        return None
    topic = "node secret"
    if importlib.util.find_spec("cryptography") is None:
        return bad(topic, "the package cryptography is missing", "pip install cryptography")
    try:
        secret = SecretFile(path)
    except SecretFileError as error:
        text = str(error)
        fix = f"chmod 600 {path}" if "chmod" in text else f"copy the head's file to {path}"
        if not Path(path).exists():
            fix += f"; on the head: gllm node --new-secret {path}"
        return bad(topic, text, fix)
    return good(topic, f"{path} has {len(secret.keys)} secret(s) and the right mode")


def check_launcher(
    nodes: NodesConfig, num_stages: int | None, environment: Mapping[str, str]
) -> Finding:
    """Check that flags and the launcher's environment (Slurm, torchrun) agree on rank and size.

    Args:
        nodes: flags about nodes.
        num_stages: number of pipeline stages; None if it is not known.
        environment: environment variables, such as those of Slurm or torchrun.
    """
    try:
        place = read_node_rank(nodes, environment, num_stages)
    except ValueError as error:
        return bad("rank", str(error), "change the flag or the variable that the message names")
    if place.num_nodes == 1:
        return note("rank", "one machine, or --nnodes and a launcher's environment are not given")
    head = " (the head)" if place.is_head else ""
    address = format_host_port(place.host, place.port)
    text = f"rank {place.rank}{head} of {place.num_nodes}, the head is at {address}"
    return good("rank", text)
