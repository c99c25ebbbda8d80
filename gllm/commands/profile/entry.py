"""Sub-commands of `gllm profile`: an engine's step times, or output lengths of step logs.

Each is imported when it is called: training on logs needs no engine.
"""

import argparse


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm profile MODEL`."""
    from gllm.commands.profile import command

    return command.make_parser()


def main(argv: list[str]) -> int:
    """Run `gllm profile lengths`, or measure the step times of a model; return the exit status."""
    if argv[:1] == ["lengths"]:
        from gllm.commands.profile import lengths

        return lengths.main(argv[1:])
    from gllm.commands.profile import command

    return command.main(argv)
