"""The processes of one engine: driver, stage workers, executors, and the client of the parent.

gllm/transport moves activations between them, gllm/messages has their messages, and gllm/scheduler
decides which requests run.
"""
