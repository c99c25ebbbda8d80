"""Tickets are unguessable, used by one reader, and worth nothing once revoked."""

import pytest

from gllm.messages.handoff import MAX_TICKET, make_ticket
from gllm.transport.kv.tickets import HeldBlocks, TicketBook, TicketError


def test_tickets_are_large_and_different() -> None:
    tickets = {make_ticket() for _ in range(1000)}
    assert len(tickets) == 1000
    assert all(0 < ticket <= MAX_TICKET for ticket in tickets)
    # A generator with fewer bits would not set the upper ones.
    assert max(tickets) > 2**60


def test_first_reader_is_the_only_one() -> None:
    book, held = TicketBook(), HeldBlocks(10, [1, 2, 3])
    book.hold(7, held)
    assert book.use(7, 100, 0, 10) is held
    assert book.use(7, 100, 4, 6) is held
    with pytest.raises(TicketError, match="not held"):
        book.use(7, 101, 0, 10)
    with pytest.raises(TicketError, match="not held"):
        book.use(8, 100, 0, 10)
    assert book.num_refused == 2


def test_a_reader_that_leaves_makes_room_for_another_one() -> None:
    book, held = TicketBook(), HeldBlocks(10, [1, 2, 3])
    book.hold(7, held)
    book.use(7, 100, 0, 10)
    assert book.may_be_used_later(7, 101)
    assert not book.may_be_used_later(7, 100)
    book.leave(7, 101)
    with pytest.raises(TicketError, match="not held"):
        book.use(7, 101, 0, 10)
    book.leave(7, 100)
    assert not book.may_be_used_later(7, 101)
    assert book.use(7, 101, 0, 10) is held
    with pytest.raises(TicketError, match="not held"):
        book.use(7, 100, 0, 10)
    book.revoke(7)
    book.leave(7, 101)
    assert not book.may_be_used_later(7, 100)


@pytest.mark.parametrize(("first", "count"), [(0, 11), (-1, 3), (10, 1), (3, 0)])
def test_tokens_beyond_the_held_ones_are_refused(first: int, count: int) -> None:
    book = TicketBook()
    book.hold(7, HeldBlocks(10, [1, 2, 3]))
    with pytest.raises(TicketError, match="of 10 are requested"):
        book.use(7, 1, first, count)


def test_revoked_ticket_is_never_held_again() -> None:
    book, held = TicketBook(), HeldBlocks(10, [1, 2, 3])
    book.hold(7, held)
    assert book.is_held(7, held)
    book.revoke(7)
    book.revoke(7)
    assert not book.is_held(7, held)
    with pytest.raises(TicketError, match="has ended"):
        book.hold(7, HeldBlocks(10, [1, 2, 3]))
    book.clear()
    assert len(book) == 0


def test_only_a_ticket_that_was_never_held_may_come() -> None:
    book = TicketBook()
    assert book.may_be_used_later(7, 1)
    for ticket in (7, 8):
        book.hold(ticket, HeldBlocks(10, [1, 2, 3]))
    assert not book.may_be_used_later(7, 1)
    book.revoke(7)
    book.clear()
    assert not book.may_be_used_later(7, 1)
    assert not book.may_be_used_later(8, 1)
    assert book.may_be_used_later(9, 1)


@pytest.mark.parametrize("ticket", [0, -1, MAX_TICKET + 1])
def test_invalid_tickets_are_not_held(ticket: int) -> None:
    with pytest.raises(TicketError, match="invalid or has ended"):
        TicketBook().hold(ticket, HeldBlocks(1, [0]))


def test_blocks_of_a_ticket_grow_with_the_prefill() -> None:
    book = TicketBook()
    book.hold(7, HeldBlocks(4, [1], step=3, is_partial=True))
    held = book.use(7, 100, 0, 10, accepts_part=True)
    with pytest.raises(TicketError, match="of 4 are requested"):
        book.use(7, 100, 0, 10)
    book.hold(7, HeldBlocks(10, [1, 2, 3], step=4))
    assert book.is_held(7, held)
    assert (held.num_tokens, held.block_ids, held.is_partial) == (10, [1, 2, 3], False)
    assert [held.find_chunk(first) for first in (0, 3, 4, 9)] == [(4, 3, 0)] * 2 + [(10, 4, 0)] * 2
    book.hold(7, HeldBlocks(10, [1, 2, 3]))
    assert held.find_chunk(0) == (10, 0, 0)
    with pytest.raises(TicketError, match="of 10 are requested"):
        book.use(7, 100, 0, 11, accepts_part=True)


@pytest.mark.parametrize("other", [HeldBlocks(3, [1]), HeldBlocks(8, [2, 3])])
def test_a_served_ticket_keeps_its_blocks(other: HeldBlocks) -> None:
    book = TicketBook()
    book.hold(7, HeldBlocks(4, [1], is_partial=True))
    with pytest.raises(TicketError, match="in use for other blocks"):
        book.hold(7, other)


def test_the_machines_of_a_reader_are_counted() -> None:
    book = TicketBook()
    book.hold(7, HeldBlocks(10, [1]))
    book.use(7, 5, 0, 10)
    assert [book.count_complete(7, reader) for reader in (5, 6, 5)] == [1, 0, 2]
    # One machine has failed, so that another fetch begins anew.
    book.leave(7, 5)
    assert not book.count_complete(7, 5)
    book.use(7, 6, 0, 10)
    assert book.count_complete(7, 6) == 1
    book.revoke(7)
    assert not book.count_complete(7, 6)
