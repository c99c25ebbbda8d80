"""Choice of the end of an edge between two machines that dials the other one."""


def source_dials(source: str, source_address: str, target: str, target_address: str) -> bool:
    """Return True if the sending machine of an edge dials the receiving one.

    Args:
        source: name of the machine that sends.
        source_address: HOST:PORT at which it accepts data connections; empty if it accepts none.
        target: name of the machine that receives.
        target_address: as `source_address`.

    Raises:
        ValueError: neither of them accepts connections.
    """
    if not source_address and not target_address:
        raise ValueError(
            f"neither node {source!r} nor node {target!r} accepts data connections, and their "
            "stages are neighbours: open --data-port on one of them, or forward a port to it and "
            "name that with --advertise HOST:PORT"
        )
    return bool(target_address)
