"""Error of an engine that cannot serve."""


class EngineError(Exception):
    """The engine could not start, or has died; the message has the cause."""
