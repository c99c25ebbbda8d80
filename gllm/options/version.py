"""The version of gllm, in one place: setup.py, `gllm --version` and every announcement read it."""

__version__ = "0.1.0"
