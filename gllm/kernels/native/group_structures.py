"""Structures of all_reduce.cpp, which documents their fields: shared state and arguments.

The implementation without a compiler (`gllm.transport.region_memory`) uses the shared ones too.
"""

import ctypes

NUM_PLACES = 5
"""Places per rank of a group, `PLACES` in all_reduce.cpp."""
MAX_RANKS = 64
"""Most ranks of a group, as in all_reduce.cpp."""


class RankLine(ctypes.Structure):
    """Mirror of `RankLine`."""

    _fields_ = [
        ("sequence", ctypes.c_uint32),
        ("is_sleeping", ctypes.c_uint32),
        ("doorbell", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("tags", ctypes.c_uint64 * 2),
        ("padding", ctypes.c_uint8 * 96),
    ]


class RankGroupState(ctypes.Structure):
    """Mirror of `RankGroup`."""

    _fields_ = [
        ("lines", ctypes.c_void_p),
        ("closed", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("rank_bytes", ctypes.c_int64),
        ("offsets", ctypes.c_int64 * NUM_PLACES),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("sequence", ctypes.c_uint32),
        ("spin_ns", ctypes.c_uint32),
        ("used", ctypes.c_uint32 * NUM_PLACES),
    ]


class BarrierArguments(ctypes.Structure):
    """Mirror of `BarrierArguments`."""

    _fields_ = [
        ("group", ctypes.POINTER(RankGroupState)),
        ("tag", ctypes.c_uint64),
        ("place", ctypes.c_int32),
        ("is_acquire", ctypes.c_int32),
    ]


class ReduceArguments(ctypes.Structure):
    """Mirror of `ReduceArguments`."""

    _fields_ = [
        ("group", ctypes.POINTER(RankGroupState)),
        ("part", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("place", ctypes.c_int32),
        ("collective", ctypes.c_int32),
        ("float_part", ctypes.c_int32),
        ("float_bias", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class CancelArguments(ctypes.Structure):
    """Mirror of `CancelArguments`."""

    _fields_ = [("group", ctypes.POINTER(RankGroupState))]
