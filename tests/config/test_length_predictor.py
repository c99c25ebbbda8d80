"""`--length-predictor` of engines and routers: what is accepted, and what is refused."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.options.flags import FlagParser, add_flags, config_from_flags
from gllm.scheduler.config import SchedulerConfig

RESERVING = ["--kv-admission", "reserve-dynamic"]


def parse(config: type, *words: str) -> str | None:
    parser = FlagParser(prog="gllm")
    add_flags(parser, config)
    parsed = config_from_flags(config, parser.parse_args(list(words)))
    return parsed.length_predictor


def test_engines_and_routers_know_the_same_predictors() -> None:
    for name in ("by-max-tokens", "by-prompt", "nearest"):
        assert parse(RouterConfig, "--length-predictor", name) == name
        assert parse(EngineConfig, "--length-predictor", name, *RESERVING) == name
    assert parse(RouterConfig) is None
    assert parse(EngineConfig) is None


@pytest.mark.parametrize("config", [RouterConfig, EngineConfig])
def test_bad_files_are_refused_by_the_flag(
    config: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.json"
    path.write_bytes(b"\x80\x04\x95pickle")
    for value, message in ((str(path), "no length classifier"), ("mean", "is none of by-max")):
        with pytest.raises(SystemExit):
            parse(config, "--length-predictor", value, *(RESERVING * (config is EngineConfig)))
        error = capsys.readouterr().err
        assert "--length-predictor" in error
        assert message in error


def test_an_engine_without_a_reader_of_predictions_refuses_the_flag() -> None:
    scheduler = SchedulerConfig(preset="tetri")
    assert EngineConfig(length_predictor="nearest", scheduler=scheduler).length_predictor
    with pytest.raises(ValueError, match="would change nothing: set kv_admission to reserve-st"):
        EngineConfig(length_predictor="nearest")
