"""Execution on emulated devices, which wait instead of computing."""
