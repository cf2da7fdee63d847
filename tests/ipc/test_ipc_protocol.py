"""The slot protocol in every interleaving of small cases, with fake memory and fake words."""

from __future__ import annotations

import pytest
from ipc_model import FROM_ROOT, LEADER, ONE, SPLIT, TO_ROOT, Explorer, ProtocolViolation, Rules

from ray_fracbackend.ipc.protocol.schedule import NUM_COUNTS, WRITTEN, Action, Course

MIXED = [(2, ONE), (1, SPLIT), (1, ONE), (2, SPLIT), (1, ONE)]
LED = [(1, LEADER), (1, ONE), (2, LEADER), (1, TO_ROOT), (1, LEADER)]
ROOTED = [(3, FROM_ROOT), (1, TO_ROOT), (1, FROM_ROOT), (2, ONE)]


@pytest.mark.parametrize("calls", [MIXED, LED, ROOTED])
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_host_memory_is_never_read_at_the_wrong_time(num_ranks: int, calls: list[tuple[int, str]]) -> None:
    """Collectives of all kinds in a row: in every interleaving each read returns the intended chunk, and all finish."""
    assert Explorer(num_ranks, calls, device=False).explore() > len(calls)


@pytest.mark.parametrize(
    "calls",
    [
        [(2, ONE)],
        [(1, SPLIT)],
        pytest.param([(3, ONE)], marks=pytest.mark.full),
        pytest.param([(2, SPLIT)], marks=pytest.mark.full),
        pytest.param([(1, ONE), (1, SPLIT), (1, ONE)], marks=pytest.mark.full),
        [(2, LEADER)],
        [(1, LEADER), (1, ONE), (1, LEADER)],
        [(3, TO_ROOT)],
        [(3, FROM_ROOT)],
        [(1, TO_ROOT), (1, LEADER), (1, TO_ROOT)],
    ],
)
def test_device_memory_is_never_read_at_the_wrong_time(calls: list[tuple[int, str]]) -> None:
    """The same if streams run arbitrarily late, and only words order them."""
    assert Explorer(2, calls, device=True).explore() > 100


# Protocols with one mistake each; the model must find an interleaving that shows it.
WRONG = {
    "one slot": (Rules(buffers=1), False, ONE),
    "one folded area": (Rules(buffers=1), False, SPLIT),
    "published before written": (Rules(publish_before_put=True), False, ONE),
    "no wait for counters": (Rules(skip_await=True), False, ONE),
    "no wait of the stream": (Rules(skip_wait=True), True, ONE),
    "a wait for less": (Rules(wait_for_less=True), True, ONE),
    "a word written before the slot": (Rules(record_before_put=True), True, ONE),
    "a slot written again at once": (Rules(skip_wait_to_write=True), True, TO_ROOT),
    "counts that are stored before the counter": (Rules(count_before_progress=True), True, ONE),
    "a TAKE that is never announced": (Rules(never_announces_a_take=True), False, FROM_ROOT),
    "one buffer for the leader": (Rules(buffers=1), True, LEADER),
    "the leader publishes before it has folded": (Rules(publish_before_fold=True), False, LEADER),
    "no wait for the leader": (Rules(skip_wait=True), True, LEADER),
    "a wait for less of the leader": (Rules(wait_for_less=True), True, LEADER),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_model_finds_a_wrong_protocol(name: str) -> None:
    """Each broken rule leads to a wrong read, so the tests above do not pass by accident."""
    rules, device, kind = WRONG[name]
    with pytest.raises(ProtocolViolation):
        Explorer(2, [(3, kind)], device=device, rules=rules).explore()


def play(course: Course, words: list[int], limit: int = 100) -> list[tuple[Action, int]]:
    """Run a rank by itself until it has to wait or has finished."""
    found = []
    while (action := course.next(words, [(1, NUM_COUNTS)])) not in (None, Action.AWAIT) and len(found) < limit:
        assert action is not None
        found.append((action, course.chunk))
        course.after(action)
    return found


def test_a_late_peer_does_not_stop_a_rank_before_its_slots_are_full() -> None:
    """It puts chunks while there are slots; if the peer is present, it uses each chunk before it continues."""
    late = Course(1, 5, 3, False, True, False, True)
    assert play(late, [0] * 8) == [(Action.PUT, 1), (Action.PUT, 2), (Action.PUT, 3)]
    there = [0, 0, 0, 0, 9, 5, 5, 5]
    assert play(late, there)[:3] == [(Action.TAKE, 1), (Action.TAKE, 2), (Action.TAKE, 3)]
    prompt = Course(1, 3, 3, False, True, False, True)
    assert [action for action, _ in play(prompt, there)] == 3 * [Action.PUT, Action.TAKE]
    assert prompt.next(there, [(1, NUM_COUNTS)]) is None


def test_a_rank_waits_for_what_its_lowest_chunk_lacks() -> None:
    """In two passes it waits first for the slots, then for the folded areas; never for what only a later chunk needs."""
    course = Course(1, 4, 2, True, True, True, True)
    words = [0, 0, 0, 0, 1, 1, 0, 0]
    assert play(course, words) == [(Action.PUT, 1), (Action.FOLD, 1), (Action.PUT, 2)]
    assert course.next(words, [(1, NUM_COUNTS)]) is Action.AWAIT
    assert (course.kind, course.value) == (2, 1)


def test_a_rank_that_neither_folds_nor_takes_waits_until_all_have_begun() -> None:
    """It may finish its own part long before."""
    course = Course(1, 1, 2, False, True, False, False)
    words = [0] * 8
    assert play(course, words) == [(Action.PUT, 1)]
    assert course.is_over()
    assert (course.kind, course.value) == (WRITTEN, 1)
    words[NUM_COUNTS + WRITTEN] = 1
    assert course.next(words, [(1, NUM_COUNTS)]) is None


def test_a_rank_lags_where_an_earlier_chunk_waits_for_another() -> None:
    """There is a short wait before a later chunk, but not before the first, and not if nothing else is left."""
    words, peers = [0] * 8, [(1, NUM_COUNTS)]
    course = Course(1, 3, 3, False, True, False, True)
    assert course.next(words, peers) is Action.PUT
    assert not course.lags(words, peers)
    course.after(Action.PUT)
    assert course.next(words, peers) is Action.PUT
    assert course.lags(words, peers)
    assert (course.chunk, course.peer, course.kind, course.value) == (2, 1, WRITTEN, 1)
    words[NUM_COUNTS + WRITTEN] = 1
    assert course.next(words, peers) is Action.TAKE
    course.after(Action.TAKE)
    assert course.next(words, peers) is Action.PUT
    assert not course.lags(words, peers)
    sends = Course(1, 3, 3, False, True, False, False)
    assert sends.next(words, peers) is Action.PUT
    sends.after(Action.PUT)
    assert sends.next(words, peers) is Action.PUT
    assert not sends.lags(words, peers)
