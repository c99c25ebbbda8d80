"""Processes that Ray places on its machines and restarts there.

They are the agents of an engine's other machines (`--distributed-executor-backend ray`), or the
router and the engines of a plan (`gllm up --on ray`). An actor owns each one. Control, activations
and requests never pass through Ray. With agents, a process of its own talks to Ray (`python -m
gllm.deploy.ray`), so that a failure of Ray costs a recovery and not the head.
"""
