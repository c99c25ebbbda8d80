"""The end of an edge that dials."""

import pytest

from gllm.recovery.placement import source_dials


@pytest.mark.parametrize(
    ("source", "target", "is_source"),
    [("a:1", "b:1", True), ("", "b:1", True), ("a:1", "", False)],
)
def test_the_receiver_is_dialled_if_it_can_be(source: str, target: str, is_source: bool) -> None:
    assert source_dials("left", source, "right", target) is is_source


def test_two_nodes_that_only_dial_are_named_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"'left' nor node 'right'.*--data-port.*--advertise"):
        source_dials("left", "", "right", "")
