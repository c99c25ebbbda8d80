"""Logs, metrics, bubbles and the step log: the record of a run, for a server and the simulator.

Nothing here decides anything; times are arguments.
"""
