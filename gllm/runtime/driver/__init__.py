"""The driver: runs the scheduler and keeps micro-batches in flight, in the first stage's worker."""
