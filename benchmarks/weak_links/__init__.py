"""Measure serving over weak links on the rig: first come, first served against link policies."""
