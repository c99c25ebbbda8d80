"""Search for plaintext in what has passed a network."""

RUN_BYTES = 16
"""Shortest run of plaintext that a wire may not show."""


def runs_of(data: bytes) -> set[bytes]:
    """All runs of RUN_BYTES with enough different bytes to be no accident."""
    runs = (data[start : start + RUN_BYTES] for start in range(len(data) - RUN_BYTES + 1))
    return {run for run in runs if len(set(run)) > RUN_BYTES // 2}
