"""Which losses of engines are deaths, and which request caused them."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.engine_losses import PROOF_SECONDS, RETURN_SECONDS, EngineLosses, LossKind
from tests.support.examples import num_examples

DIED, CLOSED, SILENT = LossKind.DIED, LossKind.CLOSED, LossKind.SILENT


class Rig:
    """A router's record; request `p` is at each engine that is lost."""

    def __init__(self) -> None:
        self.losses: EngineLosses[str] = EngineLosses(2)
        self.now = 100.0

    def lose(
        self, run: int, kind: LossKind, *others: str, oldest_other: float | None = 0.0
    ) -> list[str]:
        poisons = self.losses.on_lost(
            f"e{run}", run, kind, "cause", ["p", *others], oldest_other, self.now
        )
        return [poison.request for poison in poisons]

    def tick(self, seconds: float, is_in_contact: bool = True) -> list[str]:
        self.now += seconds
        return [each.request for each in self.losses.on_tick(is_in_contact, self.now)]

    def suspects(self) -> list[str]:
        return self.losses.suspects(["p", "q"])


def test_the_deaths_of_two_engines_and_of_one_for_itself_are_a_requests_fault() -> None:
    rig = Rig()
    assert rig.lose(1, DIED, "q") == rig.lose(2, DIED, "q") == []
    assert rig.suspects() == ["p", "q"]
    rig.losses.isolate("p", rig.now)
    assert rig.lose(3, DIED) == ["p"]
    assert rig.suspects() == [], "the deaths are explained"


def test_silence_is_no_death() -> None:
    rig = Rig()
    for run in range(5):
        assert rig.lose(run, SILENT) == []
        assert rig.tick(1000.0 * (run % 2)) == []
    assert rig.suspects() == []


def test_silence_is_a_death_once_another_start_of_the_engine_announces_itself() -> None:
    rig = Rig()
    rig.lose(1, SILENT)
    rig.lose(2, SILENT)
    assert rig.losses.on_attached("e1", 11) == rig.losses.on_attached("e2", 12) == []
    assert rig.suspects() == ["p"]


def test_an_engine_that_returns_has_not_died() -> None:
    rig = Rig()
    rig.lose(1, CLOSED)
    rig.lose(2, CLOSED)
    rig.losses.isolate("p", rig.now)
    assert rig.lose(3, CLOSED) == []
    assert rig.losses.awaits_proof("p")
    rig.tick(RETURN_SECONDS - 1)
    for run in (1, 2, 3):
        assert rig.losses.on_attached(f"e{run}", run) == []
    assert not rig.losses.awaits_proof("p")
    assert rig.suspects() == []
    assert rig.tick(RETURN_SECONDS) == []


def test_closed_connections_are_deaths_of_engines_that_stay_away_while_others_are_reached() -> None:
    rig = Rig()
    rig.lose(1, CLOSED)
    rig.lose(2, CLOSED)
    rig.losses.isolate("p", rig.now)
    rig.lose(3, CLOSED)
    assert rig.tick(RETURN_SECONDS * 4, is_in_contact=False) == []
    assert rig.tick(RETURN_SECONDS) == []
    assert rig.tick(RETURN_SECONDS - 0.1) == []
    assert rig.tick(0.2) == ["p"]


def test_a_refused_connection_proves_a_death() -> None:
    rig = Rig()
    for run in (1, 2):
        rig.lose(run, SILENT)
        assert rig.losses.on_refused(run) == []
    rig.losses.isolate("p", rig.now)
    rig.lose(3, SILENT)
    assert [each.request for each in rig.losses.on_refused(3)] == ["p"]


def test_without_another_engine_that_lives_on_a_second_trial_decides() -> None:
    rig = Rig()
    rig.lose(1, DIED)
    rig.lose(2, DIED)
    for run in (3, 4):
        rig.losses.isolate("p", rig.now)
        other = rig.now + 1 if run == 3 else None
        assert rig.lose(run, DIED, oldest_other=other) == (["p"] if run == 4 else [])


def test_a_token_clears_a_request() -> None:
    rig = Rig()
    rig.lose(1, DIED)
    rig.lose(2, SILENT)
    rig.losses.clear("p")
    assert rig.losses.on_attached("e2", 12) == []
    assert rig.losses.num_deaths("p") == 0
    assert not rig.losses.has_losses


def test_old_losses_are_forgotten() -> None:
    rig = Rig()
    rig.lose(1, SILENT)
    rig.tick(PROOF_SECONDS)
    assert not rig.losses.has_losses


@settings(max_examples=num_examples(100, 5000), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_request_is_to_blame_for_flaps_and_only_the_one_that_kills_for_deaths(seed: int) -> None:
    """Any order of silences, cuts and returns of the same starts, and of a request that kills."""
    rng = Random(seed)
    losses: EngineLosses[str] = EngineLosses(2)
    has_poison = rng.random() < 0.5
    runs, next_run = {"a": 1, "b": 2, "c": 3}, 4
    away: dict[str, tuple[float, int]] = {}
    """Time of the loss, and run with which the engine returns."""
    now = 0.0
    for _ in range(200):
        now += rng.uniform(0.0, 2.0)
        late = [name for name, (since, _) in away.items() if now - since > RETURN_SECONDS / 2]
        name = late[0] if late else rng.choice("abc")
        poisons = []
        if name in away:
            runs[name] = away.pop(name)[1]
            poisons = losses.on_attached(name, runs[name])
        else:
            suspects = losses.suspects(["p", "q"])
            ready = [each for each in suspects if not losses.awaits_proof(each)]
            if suspects and ready:
                losses.isolate(ready[0], now - 1.0)
            requests = ready[:1] if suspects else ["p", "q"]
            run, kind = runs[name], rng.choice([CLOSED, SILENT])
            away[name] = now, run
            if has_poison and "p" in requests:
                away[name], kind = (now, next_run), rng.choice([DIED, CLOSED, SILENT])
                next_run += 1
            poisons = losses.on_lost(name, run, kind, "", requests, 0.0, now)
        poisons += losses.on_tick(len(away) < 3, now)
        assert {each.request for each in poisons} <= ({"p"} if has_poison else set())
        has_poison = has_poison and not poisons
    assert not has_poison, "the request that kills engines is found"
