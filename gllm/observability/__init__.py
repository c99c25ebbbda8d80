"""Logs, metrics, bubbles and the step log: the record of a run, for a server and the simulator.

It makes no decisions and reads no clock: times are arguments.
"""
