"""The slot protocol under every interleaving of small cases, with fake memory and fake events."""

from __future__ import annotations

import pytest
from ipc_model import LEADER, ONE, SPLIT, Explorer, ProtocolViolation, Rules

from ray_fracbackend.ipc.protocol.schedule import Action, one_pass, schedule, two_pass

MIXED = [(2, ONE), (1, SPLIT), (1, ONE), (2, SPLIT), (1, ONE)]
LED = [(1, LEADER), (1, ONE), (2, LEADER), (1, LEADER)]


@pytest.mark.parametrize("calls", [MIXED, LED])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_host_memory_is_never_read_at_the_wrong_time(num_ranks: int, calls: list[tuple[int, str]]) -> None:
    """Collectives of all kinds in a row: each read sees exactly the step it means, in every interleaving."""
    assert Explorer(num_ranks, calls, device=False).explore() > len(calls)


@pytest.mark.parametrize(
    "calls",
    [[(3, ONE)], [(2, SPLIT)], [(1, ONE), (1, SPLIT), (1, ONE)], [(2, LEADER)], [(1, LEADER), (1, ONE), (1, LEADER)]],
)
def test_device_memory_is_never_read_at_the_wrong_time(calls: list[tuple[int, str]]) -> None:
    """The same where streams lag arbitrarily behind hosts and events alone order them, with two events a rank."""
    assert Explorer(2, calls, device=True).explore() > 100


# A protocol that is wrong in one point each; the model must find an interleaving that shows it.
WRONG = {
    "one buffer": (Rules(buffers=1), False, ONE),
    "published before written": (Rules(publish_before_put=True), False, ONE),
    "no wait for counters": (Rules(skip_await=True), False, ONE),
    "no wait for events": (Rules(skip_wait_event=True), True, ONE),
    "event waited for before the counter shows its record": (Rules(wait_event_before_await=True), True, ONE),
    "one buffer for the leader": (Rules(buffers=1), True, LEADER),
    "the leader publishes before it has folded": (Rules(publish_before_fold=True), False, LEADER),
    "no wait for the leader's event": (Rules(skip_wait_event=True), True, LEADER),
    "the leader's event waited for too early": (Rules(wait_event_before_await=True), True, LEADER),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_model_finds_a_wrong_protocol(name: str) -> None:
    """Each broken rule leads to a wrong read somewhere, so the tests above do not pass by accident."""
    rules, device, kind = WRONG[name]
    with pytest.raises(ProtocolViolation):
        Explorer(2, [(3, kind)], device=device, rules=rules).explore()


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 70])
def test_every_step_is_published_and_awaited_once(num_chunks: int) -> None:
    """Steps are consecutive, and the description is checked right after the first wait."""
    for entries, num_steps in ((one_pass(num_chunks), num_chunks), (two_pass(num_chunks), num_chunks + 1)):
        actions = list(entries)
        for action in (Action.PUBLISH, Action.AWAIT):
            assert [step for what, _, step in actions if what is action] == list(range(num_steps))
        kinds = [what for what, _, _ in actions]
        assert kinds[kinds.index(Action.AWAIT) + 1] is Action.CHECK


def test_kept_schedules_equal_fresh_ones() -> None:
    """Short schedules come from a cache and must be what the generators make."""
    for num_chunks in (1, 3, 64, 65):
        assert list(schedule(num_chunks, two_passes=False)) == list(one_pass(num_chunks))
        assert list(schedule(num_chunks, two_passes=True)) == list(two_pass(num_chunks))
