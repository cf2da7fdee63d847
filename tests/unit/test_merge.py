"""The error of a start that several ranks report."""

from itertools import permutations

import pytest
import torch
from ray.exceptions import ActorUnavailableError, NodeDiedError, RaySystemError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import (
    GroupFormationError,
    MissingDeviceError,
    OutOfMemoryError,
    RendezvousError,
    UnreachableMasterError,
    VerificationError,
    WorkerDiedError,
)
from ray_fracbackend.start.failure.merge import merged

ADDRESSES = {rank: WorkerAddress(rank, "10.0.0.3", 100 + rank, "node") for rank in range(8)}
UNREACHABLE = UnreachableMasterError("cannot reach rank 0's store.", advice="Open the port.")


def of_start(failures):
    return merged(failures, (), ADDRESSES, "starting gloo", 60.0)


def test_the_order_of_arrival_does_not_matter():
    """The most specific error is first and gives the advice, then they have the order of their ranks."""
    failures = {
        0: GroupFormationError("gloo failed.", ranks=(0,)),
        1: UNREACHABLE,
        2: OSError("disk full"),
        3: GroupFormationError("gloo failed here.", ranks=(3,)),
    }
    texts = {str(of_start({rank: failures[rank] for rank in order})) for order in permutations(failures)}
    assert texts == {
        f"{ADDRESSES[1].text}: cannot reach rank 0's store; {ADDRESSES[0].text}: gloo failed; "
        f"{ADDRESSES[3].text}: gloo failed here; {ADDRESSES[2].text}: OSError: disk full. Open the port."
    }


def test_the_most_specific_error_is_among_many():
    failures = {rank: GroupFormationError(f"failure {rank}.", ranks=(rank,)) for rank in range(7)}
    error = of_start({**failures, 7: UNREACHABLE})
    assert isinstance(error, UnreachableMasterError)
    assert str(error).startswith(f"{ADDRESSES[7].text}: cannot reach")
    assert "failure 2" in str(error)
    assert "failure 3" not in str(error)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_only_waited_is_not_named(order):
    failures = {0: RendezvousError("rank 1 did not connect.", ranks=(1,)), 1: UNREACHABLE}
    error = of_start({rank: failures[rank] for rank in order})
    assert str(error) == f"{ADDRESSES[1].text}: cannot reach rank 0's store. Open the port."
    assert error.ranks == (1,)


def test_a_rank_without_a_device_is_the_cause_of_all_other_errors():
    refused = MissingDeviceError("cuda:0 cannot be used: busy.", ranks=[1])
    error = merged({0: VerificationError("closed.", ranks=[0]), 1: refused}, (2,), ADDRESSES, "starting gloo", 60.0)
    assert (type(error), error.ranks) == (MissingDeviceError, (1,))
    assert str(error) == f"{ADDRESSES[1].text}: cuda:0 cannot be used: busy."


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({}, id="no error of the other rank"),
        pytest.param({1: RendezvousError("rank 0 did not connect.", ranks=(0,))}, id="each waited for the other"),
        pytest.param({2: UNREACHABLE}, id="only one of two ranks has an error"),
    ],
)
def test_a_rank_that_waited_for_a_rank_without_an_error_is_named(others):
    error = of_start({0: RendezvousError("ranks 1,2 did not connect.", ranks=(1, 2)), **others})
    assert f"{ADDRESSES[0].text}: ranks 1,2 did not connect" in str(error)


def test_a_rank_that_lost_a_peer_is_not_named_beside_the_rank_with_the_wrong_result():
    """Gloo's message names no rank. If all ranks lost a peer, all are named."""
    wrong = VerificationError("all_reduce computed a wrong result.", kind="wrong_answer")
    lost = VerificationError("all_reduce failed (Connection closed by peer).", kind="failed")
    error = of_start({0: lost, 1: wrong})
    assert (error.ranks, str(error)) == ((1,), f"{ADDRESSES[1].text}: all_reduce computed a wrong result.")
    assert of_start({0: lost, 1: lost}).ranks == (0, 1)
    assert of_start({0: lost, 2: VerificationError("failed.", kind="failed", ranks=[1])}).ranks == (1,)


def test_a_rank_that_lost_a_peer_while_the_group_was_created():
    """Another rank was faster, failed in the verification and ended; alone the same error names its rank."""
    cause = "Gloo connectFullMesh failed with [pair.cc:152] no error, remote=[10.0.0.4]:1"
    lost = GroupFormationError(f"creating the group failed ({cause}).", ranks=(0,), kind="failed", cause=cause)
    error = of_start({0: lost, 2: OSError("disk full")})
    assert (error.ranks, str(error)) == ((2,), f"starting gloo failed: {ADDRESSES[2].text}: OSError: disk full.")
    assert of_start({0: lost}).ranks == (0,)


def test_beside_a_silent_rank_the_others_give_no_advice():
    """They waited for it. One sentence says where to look."""
    waited = GroupFormationError("creating the group failed (timed out).", advice="Check the ports.", ranks=(0,))
    error = merged({0: waited}, (1,), ADDRESSES, "starting gloo", 60.0)
    assert error.ranks == (1,)
    assert str(error) == (
        "rank 1 (node 10.0.0.3, pid 101) did not answer (starting gloo, start_timeout_s=60); rank 0 (node 10.0.0.3, pid 100): "
        "creating the group failed (timed out). Look whether these processes are stopped or hang, and at their nodes, or raise "
        "start_timeout_s if they are only slow."
    )


def test_how_a_worker_was_lost():
    """Its connection, Ray's memory monitor, or its process, whatever the waiting ranks say; and a worker without the package."""
    for death, part in (
        (ActorUnavailableError("Socket closed", None), "rank 1 (node 10.0.0.3, pid 101) cannot be reached during"),
        (RayOutOfMemoryError("low on memory"), "low on memory. Use fewer workers per node"),
        (NodeDiedError("gone"), "died during start-up (starting gloo): gone. Look for the cause"),
    ):
        error = of_start({0: VerificationError("barrier failed", ranks=[0]), 1: death})
        assert (type(error), error.ranks) == (WorkerDiedError, (1,))
        assert part in str(error)
    missing = RaySystemError("System error: No module named 'ray_fracbackend'")
    assert "Install ray_fracbackend on every node" in str(of_start({1: missing}))


def test_the_kind_is_that_of_the_most_specific_error():
    """Kind, cause and the sentence for a fallback's warning are NCCL's refusal's; a peer that only lost it says nothing."""
    cause = "Duplicate GPU"
    refused = GroupFormationError(f"creating failed ({cause}).", advice="Look.", kind="refused", cause=cause)
    lost = VerificationError("barrier failed (closed).", advice="Go.", ranks=[1], kind="failed", cause="closed")
    for rank in (0, 1):
        error = of_start({rank: refused, 1 - rank: lost})
        assert (type(error), error.kind, error.cause) == (GroupFormationError, "refused", cause)
        assert error.found.startswith(f"{ADDRESSES[rank].text}: creating failed (Duplicate GPU)")
        assert error.advice == "Look."
    stalled = VerificationError("barrier failed (no answer).", kind="stalled")
    assert of_start({0: lost, 1: stalled}).kind == "stalled"


def test_out_of_memory():
    """Without torch's advice on fragmentation: other users of the memory may be the cause. Without a text, the class says it."""
    error = of_start({1: torch.cuda.OutOfMemoryError()})
    assert (type(error), error.ranks) == (OutOfMemoryError, (1,))
    assert "(starting gloo): OutOfMemoryError. End other processes on the device" in str(error)
    said = (
        "CUDA out of memory. Process 4711 has 7.00 GiB memory in use. Including non-PyTorch memory, this process has 0 bytes "
        "memory in use. Of the allocated memory 0 bytes is allocated by PyTorch. See documentation for Memory Management"
    )
    text = str(of_start({0: torch.cuda.OutOfMemoryError(said)}))
    assert "Process 4711 has 7.00 GiB memory in use. End other processes on the device" in text
    assert "PyTorch" not in text
