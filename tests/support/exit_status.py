"""Exit status of a command that runs in the test's process."""

from collections.abc import Callable


def exit_status(main: Callable[[list[str]], int], arguments: list[str]) -> str | int | None:
    """Return what a command's `main` returns, or the status with which argparse ends it."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
