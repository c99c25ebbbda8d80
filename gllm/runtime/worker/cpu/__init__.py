"""The executor of a stage on a CPU: each step is computed when the call returns."""
