"""The error for a model that cannot be served.

A module of its own, so that every part of loading can raise it without importing another.
"""


class ModelError(ValueError):
    """A model is missing, invalid or not supported; the message names the cause and what to do."""
