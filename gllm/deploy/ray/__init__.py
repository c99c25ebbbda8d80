"""Agents of an engine's other machines, started and restarted by Ray.

Ray reserves a bundle of resources on each machine, runs an actor there and restarts it; the actor
runs `gllm node --join`. Control and activations never pass through Ray, and a process of its own
talks to Ray (`python -m gllm.deploy.ray`), so that a failure of Ray costs a recovery and not the
head.
"""
