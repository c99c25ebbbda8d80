"""Help of a command's flags: the common ones, those of a group, those with a word, or all."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any

ALL = "all"
"""Value of --help for all flags."""
PART_HELP = "show the common flags; all, a group or a word: those flags"


class FlagFormatter(argparse.HelpFormatter):
    """Formatter that names the value of a flag once, behind all names of the flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class HelpAction(argparse.Action):
    """`--help`, `--help=all`, `--help=GROUP`, `--help=WORD`: print this part of the help and exit.

    Arguments as for argparse.Action.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        options |= {"nargs": "?", "default": argparse.SUPPRESS, "metavar": "PART"}
        super().__init__(option_strings, dest, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the help and exit with status 0."""
        rare: set[str] = getattr(parser, "rare_flags", set())
        if not rare and values in (None, ALL):
            text = parser.format_help()
        elif values == ALL:
            text = _format_sections(parser, flag_groups(parser).items(), parser.description)
        else:
            text = part_help(parser, values) if values else common_help(parser, rare)
        if not text:
            groups = ", ".join(flag_groups(parser))
            parser.error(f"no flag has {values!r} in its name or description; groups: {groups}")
        print(text, end="")
        parser.exit()


def flag_groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Return the flags of a parser by the name of their group, without empty groups."""
    groups: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups:
        if group._group_actions:
            groups.setdefault(str(group.title), []).extend(group._group_actions)
    return groups


def common_help(parser: argparse.ArgumentParser, rare: set[str]) -> str:
    """Return the help without rare flags, and how to see the others.

    Args:
        parser: Parser of the command.
        rare: Destinations of the flags to leave out.
    """
    groups = flag_groups(parser)
    common = {
        name: shown
        for name, actions in groups.items()
        if (shown := [action for action in actions if action.dest not in rare])
    }
    num_shown, num_all = (sum(map(len, sections.values())) for sections in (common, groups))
    names = ", ".join(name for name in groups if " " not in name)
    text = _format_sections(parser, common.items(), parser.description)
    return (
        f"{text}\nThese are {num_shown} of {num_all} arguments.\n"
        "  --help=all    all of them\n"
        f"  --help=GROUP  those of a group: {names}\n"
        "  --help=WORD   those with a word in their name or description\n"
    )


def part_help(parser: argparse.ArgumentParser, part: str) -> str:
    """Return the help of a group or else of the flags that match a word; empty for no flag.

    Args:
        parser: Parser of the command.
        part: Name of a group or of its class, such as scheduler or SchedulerConfig, or a word.
    """
    groups = flag_groups(parser)
    name = group_name(part)
    if name in groups:
        return _format_sections(parser, [(name, groups[name])])
    word = part.strip("-").replace("_", "-").lower()
    sections = [
        (title, [action for action in actions if word and _has_word(action, word)])
        for title, actions in groups.items()
    ]
    sections = [section for section in sections if section[1]]
    return _format_sections(parser, sections) if sections else ""


def group_name(class_name: str) -> str:
    """Return the group of a configuration class: `kv-events` for KvEventsConfig."""
    name = class_name.removesuffix("Config")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def _has_word(action: argparse.Action, word: str) -> bool:
    texts = [*action.option_strings, action.help or "", *map(str, action.choices or ())]
    return any(word in text.lower() for text in texts)


def _format_sections(
    parser: argparse.ArgumentParser,
    sections: Iterable[tuple[str, Sequence[argparse.Action]]],
    description: str | None = None,
) -> str:
    """Return the usage line, a description and sections of flags."""
    formatter = parser._get_formatter()
    positional = [action for action in parser._actions if not action.option_strings]
    words = [
        formatter._format_args(action, str(action.metavar or action.dest)) for action in positional
    ]
    formatter.add_usage(" ".join([parser.prog, *words, "[FLAGS]"]), (), ())
    formatter.add_text(description)
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
