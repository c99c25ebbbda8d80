"""Planner of prefill and decode replicas on unlike devices: HexGen-2 (arXiv 2502.07903)."""
