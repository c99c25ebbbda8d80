"""Workloads: lengths, arrivals, conversations and traces."""
