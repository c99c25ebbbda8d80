"""The processes of one engine: driver, stage workers, executors, and the client of the parent.

Everything that waits for another process is here. transport/ moves activations, messages/ has the
messages, scheduler/ decides what runs.
"""
