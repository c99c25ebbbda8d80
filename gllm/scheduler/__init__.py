"""Scheduler: decides which requests run next on one pipeline, without I/O, torch or a clock.

The driver of a running pipeline and the simulator use the same Scheduler.
"""
