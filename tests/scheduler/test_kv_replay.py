"""Step logs with KV that moves between engines: the logged calls make the same plans again."""

import msgspec

from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import KvTransferEvent, ScheduleEvent, StepLogEvent
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_kv_fetches import handed_off
from tests.scheduler.test_kv_holds import commit, make_scheduler, run, ticket_request


def test_logged_fetches_and_holds_make_the_same_plans_again() -> None:
    config, log = make_scheduler(num_blocks=12).config, list[StepLogEvent]()
    scheduler = LoggedScheduler(config, log.append, lambda: 0.0)
    for seq in range(3):
        scheduler.add(ticket_request(seq, 5), 0.0)
    run(scheduler, 0.0)
    for seq in range(3, 6):
        scheduler.add(handed_off(seq, 9, max_tokens=5), 1.0)
    fetches = scheduler.transfers.start_fetches(1.0)
    scheduler.transfers.record_progress(fetches[0].seq)
    scheduler.transfers.finish_fetch(fetches[0].seq, True)
    for fetch in fetches[1:]:
        scheduler.transfers.finish_fetch(fetch.seq, False)
    scheduler.add(SchedulerRequest(6, [3] * 9, 4), 1.0)
    run(scheduler, 1.0)
    scheduler.transfers.renew([100], 2.0)
    scheduler.transfers.release([102])
    for ticket in scheduler.transfers.pop_revocations(HOLD_LEASE_SECONDS + 1):
        scheduler.transfers.confirm_revocation(ticket)
    for fetch in scheduler.transfers.start_fetches(3.0):
        scheduler.transfers.finish_fetch(fetch.seq, True)
    run(scheduler, 3.0)
    scheduler.add(SchedulerRequest(7, [4] * 5, 8), 4.0)
    while scheduler.table.sequences[7].num_output_tokens < 2:
        plan = scheduler.schedule(4.0)
        assert plan is not None
        commit(scheduler, plan)
    scheduler.hand_off(7, 500)
    assert run(scheduler, 4.0) == [7]
    encoded = msgspec.json.encode(log)
    again, calls = Scheduler(config), set[str]()
    for event in msgspec.json.decode(encoded, type=list[StepLogEvent]):
        plan = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or plan == event.plan
        if isinstance(event, KvTransferEvent):
            calls.add(event.call)
    assert len(calls) == 8
    assert again.stats() == scheduler.stats()
