"""Who is told what of a request."""

import pytest

from gllm.messages import Abort, Begun, Message, Register, Sampling, Step, Submit
from gllm.runtime.driver import Driver
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler


class Heard:
    """A stage that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def send_encoded(self, payload: bytes) -> None:
        raise AssertionError("nothing is planned here")


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_a_prompt_goes_to_those_who_need_it(
    stages: int, on_devices: bool, repetition: float
) -> None:
    """To the first stage, and to the last where it samples by it or keeps tokens on a device."""
    heard = [Heard() for _ in range(stages)]
    config = SchedulerConfig().resolve(stages, 64, 128)
    driver = Driver(Scheduler(config), heard[0].send, [*heard[1:]], Heard(), on_devices)
    sampling = Sampling(repetition_penalty=repetition)
    driver.submit(Submit(5, [1, 2, 3], sampling, 4, []))
    registered = [stage.messages[0] for stage in heard]
    assert all(isinstance(message, Register) for message in registered)
    knows = [bool(message.prompt) for message in registered if isinstance(message, Register)]
    at_last = stages == 1 or on_devices or repetition != 1
    assert knows == [True, *[False] * (stages - 2), *[at_last] * (stages > 1)]
    told = [message.sampling for message in registered if isinstance(message, Register)]
    assert told == [*[None] * (stages - 1), sampling]


@pytest.mark.parametrize("grammar", ["", "a grammar that is still being compiled"])
def test_stages_forget_choices_that_were_aborted_before_they_began(grammar: str) -> None:
    """They know all choices of a request from its registration on."""
    stage = Heard()
    config = SchedulerConfig().resolve(1, 64, 128)
    driver = Driver(Scheduler(config), stage.send, [], Heard())
    driver.submit(Submit(5, [1, 2, 3], Sampling(grammar=grammar), 4, [], n=3))
    driver.abort(Abort([7]))
    driver.submit(Submit(8, [4], Sampling(), 4, []))
    driver.begin(Begun(5))
    driver.turn()
    assert not driver._held
    assert not driver._cancelled
    released = [one.plan.released for one in stage.messages if isinstance(one, Step)]
    assert released[0] == [7]
