"""Probes by other projects' clients."""
