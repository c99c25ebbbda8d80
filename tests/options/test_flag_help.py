"""The help of commands with many flags: the common ones, a group, a word, all."""

import pytest

from gllm import serve
from gllm.commands import router
from gllm.commands.bench import latency
from gllm.options.flag_help import flag_groups, group_name
from gllm.options.flags import FlagParser


def help_of(capsys: pytest.CaptureFixture, parser: object, *arguments: str) -> str:
    assert isinstance(parser, FlagParser)
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(arguments)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def shown(text: str, parser: FlagParser) -> set[str]:
    """Return the first names of the flags that a help text describes."""
    lines = [line.strip().partition(" ")[0].rstrip(",") for line in text.splitlines()]
    return {a.option_strings[0] for a in parser.flags if a.option_strings} & set(lines)


@pytest.mark.parametrize(("module", "most"), [(serve, 90), (router, 70), (latency, 90)])
def test_help_is_short(module, most: int, capsys: pytest.CaptureFixture) -> None:
    text = help_of(capsys, module.make_parser(), "--help")
    assert len(text.splitlines()) <= most
    assert "--help=all" in text


def test_serve_has_the_twenty_flags_that_people_use_first(capsys: pytest.CaptureFixture) -> None:
    parser = serve.make_parser()
    assert isinstance(parser, FlagParser)
    flags = shown(help_of(capsys, parser, "-h"), parser) - {"-h", "--version"}
    assert len(flags) == 20
    assert {"--model", "--port", "--config", "--max-model-len", "--max-num-seqs"} <= flags
    assert "--kv-push-threshold" not in flags


def test_all_shows_each_flag_once(capsys: pytest.CaptureFixture) -> None:
    parser = serve.make_parser()
    text = help_of(capsys, parser, "demo", "--help=all")
    names = [action.option_strings[0] for action in parser._actions if action.option_strings]
    for name in names:
        lines = [
            line for line in text.splitlines() if line.startswith((f"  {name} ", f"  {name},"))
        ]
        assert len(lines) == 1, name
    assert sum(map(len, flag_groups(parser).values())) == len(parser._actions)


def test_a_group_is_named_as_its_class_or_as_in_the_help(capsys: pytest.CaptureFixture) -> None:
    parser = serve.make_parser()
    assert isinstance(parser, FlagParser)
    by_name = help_of(capsys, parser, "--help=scheduler")
    assert by_name == help_of(capsys, parser, "--help=SchedulerConfig")
    assert {"--policy", "--block-size", "--lanes"} <= shown(by_name, parser)
    assert not {"--port", "--model", "--nnodes"} & shown(by_name, parser)


@pytest.mark.parametrize("word", ["ssl", "--ssl", "SSL", "--ssl-key"])
def test_a_word_shows_the_flags_that_have_it(word: str, capsys: pytest.CaptureFixture) -> None:
    parser = serve.make_parser()
    assert isinstance(parser, FlagParser)
    flags = shown(help_of(capsys, parser, f"--help={word}"), parser)
    assert "--ssl-keyfile" in flags
    assert "--policy" not in flags


@pytest.mark.parametrize("word", ["no-such-word", "-"])
def test_a_word_without_flags_names_the_groups(word: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        serve.make_parser().parse_args([f"--help={word}"])
    assert exit_info.value.code == 2
    assert "groups: " in capsys.readouterr().err


def test_a_parser_without_common_flags_shows_all(capsys: pytest.CaptureFixture) -> None:
    parser = FlagParser(prog="gllm test")
    parser.add_argument("--sort", type=int, help="a number")
    text = help_of(capsys, parser, "--help")
    assert text == help_of(capsys, parser, "--help=all")
    assert "--sort SORT" in text
    assert "--help=all" not in text


def test_names_of_groups() -> None:
    assert [group_name(name) for name in ("KvEventsConfig", "ServerConfig", "nodes")] == [
        "kv-events", "server", "nodes",
    ]  # fmt: skip
