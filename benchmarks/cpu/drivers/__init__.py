"""Drivers that run and time one engine each, in the process of its environment."""
