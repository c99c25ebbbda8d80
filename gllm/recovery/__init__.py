"""Decisions about the processes of an engine: placements, recovery from deaths, liveness.

Everything here is pure: time and events are arguments, and `gllm.runtime.head.supervisor` executes
the decisions.
"""
