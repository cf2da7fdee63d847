"""Merging the failures of the workers into one error, without Ray's processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
import torch

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    OutOfMemoryError,
    StartTimeoutError,
    VerificationError,
)
from ray_fracbackend.start import collect
from ray_fracbackend.start.collect import gather
from ray_fracbackend.timeouts import Deadline


@pytest.fixture
def failure_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the error of a start whose workers raise these errors, by rank; None means an answer."""

    def gathered(*outcomes: BaseException | None) -> FracBackendError:
        def get(refs: Any) -> Any:
            for rank in refs if isinstance(refs, list) else [refs]:
                if outcomes[rank] is not None:
                    raise outcomes[rank]
            return [None] * len(refs) if isinstance(refs, list) else None

        monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
        monkeypatch.setattr(ray, "get", get)
        ranks = range(len(outcomes))
        addresses = [WorkerAddress(rank, f"10.0.0.{rank}", 4711, f"node{rank}") for rank in ranks]
        with pytest.raises(FracBackendError) as caught:
            gather(list(ranks), addresses, Deadline(10), "starting gloo")  # type: ignore[arg-type]
        return caught.value

    return gathered


def test_the_most_specific_rank_is_reported(failure_of: Any) -> None:
    """Kind, cause and the sentence for a fallback's warning come from NCCL's refusal; a peer that only lost it says nothing."""
    refused = GroupFormationError(
        "creating failed (Duplicate GPU).", advice="Look.", kind="refused", cause="Duplicate GPU"
    )
    lost = VerificationError("barrier failed (closed).", advice="Look.", ranks=[1], kind="failed", cause="closed")
    for failures, rank in (((lost, refused), 1), ((refused, lost), 0)):
        error = failure_of(*failures)
        assert (type(error), error.kind, error.cause) == (GroupFormationError, "refused", "Duplicate GPU")
        assert error.found.startswith(f"rank {rank} (node 10.0.0.{rank}, pid 4711): creating failed (Duplicate GPU)")
        assert error.advice == "Look."
    stalled = VerificationError("barrier failed (no answer).", kind="stalled")
    assert failure_of(lost, stalled).kind == "stalled"


def test_out_of_memory(failure_of: Any) -> None:
    """Without torch's advice on fragmentation: other users of the memory may be the cause. Without a text, the class says it."""
    error = failure_of(None, torch.cuda.OutOfMemoryError())
    assert isinstance(error, OutOfMemoryError)
    assert "(starting gloo): OutOfMemoryError. End other processes on the device" in str(error)
    said = (
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 MiB is free. "
        "Process 4711 has 7.00 GiB memory in use. Including non-PyTorch memory, this process has 0 bytes memory in use. Of "
        "the allocated memory 0 bytes is allocated by PyTorch. See documentation for Memory Management"
    )
    text = str(failure_of(torch.cuda.OutOfMemoryError(said)))
    assert "Process 4711 has 7.00 GiB memory in use. End other processes on the device" in text
    assert "PyTorch" not in text


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
