"""Decides which requests run next on one pipeline. Pure: no I/O, no torch, time is an argument.

The driver of a running pipeline and the simulator use the same Scheduler.
"""
