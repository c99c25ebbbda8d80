"""Backends of KV transfers, one file each: shared memory, TCP, a mock delay, NIXL."""
