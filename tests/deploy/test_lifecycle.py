"""Order in which the processes of a group end."""

from dataclasses import dataclass

from gllm.deploy.lifecycle import next_to_end


@dataclass
class Process:
    name: str
    is_entry: bool = False
    is_ending: bool = False


def test_the_entry_ends_first_then_the_others_and_each_is_told_once() -> None:
    router, first, second = Process("router", is_entry=True), Process("a"), Process("b")
    assert next_to_end([first, router, second]) == [router]
    router.is_ending = True
    assert next_to_end([first, router, second]) == []
    first.is_ending = True
    assert next_to_end([first, second]) == [second]
    assert next_to_end([]) == []
