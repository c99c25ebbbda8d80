"""Figures of a run, real or simulated, and their tables and plots."""
