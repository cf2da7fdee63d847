"""Waiting for the workers with simulated answers of Ray; test_merge.py has the errors of several ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import GroupFormationError, StartTimeoutError
from ray_fracbackend.start import collect
from ray_fracbackend.start.collect import gather
from ray_fracbackend.timeouts import Deadline


@pytest.mark.parametrize(("budget_s", "is_named"), [(0.1, True), (60.0, False)])
@pytest.mark.parametrize("slack_s", [0.2, 5.0])
def test_a_rank_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, slack_s: float, budget_s: float, is_named: bool
) -> None:
    """A rank without an answer is named if another rank reached the deadline; before that it is assumed to wait for the failed rank."""

    def wait(refs: Any, timeout: float, **options: Any) -> tuple[list[int], list[int]]:
        time.sleep(min(timeout, 0.15))
        return [rank for rank in refs if rank == 0], [rank for rank in refs if rank != 0]

    def get(refs: Any) -> Any:
        if refs == []:
            return []
        raise GroupFormationError("creating the group failed.", ranks=[0])

    monkeypatch.setattr(collect, "_GRACE_S", 0.2)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    addresses = [WorkerAddress(rank, "10.0.0.7", 4711, "node") for rank in (0, 1)]
    with pytest.raises(GroupFormationError, match=r"rank 0 \(.*\): creating the group failed") as caught:
        gather([0, 1], addresses, Deadline(budget_s), "starting ipc", slack_s)  # type: ignore[list-item]
    assert caught.value.ranks == ((1,) if is_named else (0,))
    named = f"rank 1 (node 10.0.0.7, pid 4711) did not answer (starting ipc, start_timeout_s={budget_s:g})"
    assert (named in str(caught.value)) is is_named


@pytest.mark.parametrize("has_answer", [True, False])
def test_the_time_after_the_first_answer(monkeypatch: pytest.MonkeyPatch, has_answer: bool) -> None:
    """The first worker may import torch for minutes; the others then have the limit, which the error names."""

    def wait(refs: Any, timeout: float, **options: Any) -> tuple[list[int], list[int]]:
        time.sleep(min(timeout, 0.05))
        return [rank for rank in refs if rank == 0 and has_answer], [rank for rank in refs if rank or not has_answer]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda refs: [None] * len(refs))
    addresses = [WorkerAddress(rank, "10.0.0.7", 4711, "node") for rank in (0, 1)]
    deadline = Deadline(600.0 if has_answer else 0.5)
    with pytest.raises(StartTimeoutError, match=r"start_timeout_s=0\.2") as caught:
        gather([0, 1], addresses, deadline, "probing", since_first_s=0.2)  # type: ignore[list-item]
    assert caught.value.ranks == ((1,) if has_answer else (0, 1))
