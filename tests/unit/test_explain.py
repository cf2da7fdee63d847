"""Information from the plan and the workers in the error of a failed start: NCCL on shared devices, unreachable addresses."""

import pytest

from ray_fracbackend.decide.plan import Decision
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import NetworkInfo
from ray_fracbackend.errors import (
    GroupFormationError,
    RendezvousError,
    SharedDeviceError,
    StartTimeoutError,
    UnreachableMasterError,
    VerificationError,
)
from ray_fracbackend.start.failure.explain import explained
from tests.unit import test_rendezvous as network
from tests.unit.builders import gpu, job, mig
from tests.unit.test_error_texts import DUPLICATE, REFUSALS, torch_text

_NEW = (2, 30, 7)


def failed(text="", kind="failed", ranks=(), cls=VerificationError):
    """Return an error as a worker raises it, with NCCL's message as the cause."""
    return cls(f"barrier failed ({text}).", kind=kind, cause=text, ranks=ranks)


def multi_rank(**facts):
    workers = job(gpu(), gpu(), nccl_version=_NEW, **facts)
    return decide_start(workers, Settings(on_shared_device="nccl")), workers


@pytest.mark.parametrize("sentence", REFUSALS.values(), ids=REFUSALS)
def test_refusal_becomes_one_error(sentence):
    """NCCL's duplicate-GPU error becomes a SharedDeviceError with the share map, the version and the advice."""
    plan, workers = multi_rank()
    error = explained(failed(sentence, "refused", [1]), plan, workers, "10.0.0.1")
    assert isinstance(error, SharedDeviceError)
    assert error.ranks == (0, 1)
    assert str(error).startswith(
        "NCCL 2.30.7 refused the start: ranks 0,1 share GPU-a (NVIDIA H200) on node 10.0.0.1 ("
    )
    assert str(error).endswith("use backend='gloo'.")


def test_bare_invalid_usage_of_ranks_that_share():
    """ncclInvalidUsage counts as the refusal only if the ranks are known to share a device."""
    plan, workers = multi_rank()
    bare = failed(torch_text().splitlines()[0], "invalid_usage")
    assert isinstance(explained(bare, plan, workers, "10.0.0.1"), SharedDeviceError)
    apart = job(gpu("a"), gpu("b"))
    assert explained(bare, decide_start(apart, Settings()), apart, "10.0.0.1") is bare


def test_users_own_variables_are_named():
    """If a variable of the user was kept, the error names it first."""
    plan, workers = multi_rank(env={"NCCL_MULTI_RANK_GPU_ENABLE": "0", "NCCL_MAX_CTAS": "16"})
    text = str(explained(failed(REFUSALS["2.30.7"], "refused"), plan, workers, "10.0.0.1"))
    assert "The user set NCCL_MAX_CTAS=16, NCCL_MULTI_RANK_GPU_ENABLE=0, which was kept: unset it" in text


def test_an_interface_that_is_not_there_is_no_shared_device():
    """NCCL reports both as an invalid usage: only the plan's warning names the variable and the ranks, and not for Gloo."""
    network = NetworkInfo(interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)})
    facts = {"env": {"NCCL_SOCKET_IFNAME": "nosuch0"}, "network": network}
    plan, workers = multi_rank(**facts)
    doubt = "ranks 0,1: NCCL_SOCKET_IFNAME=nosuch0 is kept, but it matches none of this node's interfaces (lo, eth0)"
    assert doubt in plan.warnings
    at_once = GroupFormationError("x", kind="invalid_usage")  # with torch 2.15
    for bare in (failed(torch_text().splitlines()[0], "invalid_usage", [1]), at_once):
        assert explained(bare, plan, workers, "10.0.0.1") is bare
    assert isinstance(explained(failed(DUPLICATE, "refused"), plan, workers, "10.0.0.1"), SharedDeviceError)
    workers = job(gpu("a"), gpu("b"), **facts)
    assert len(decide_start(workers, Settings()).warnings) == 1
    assert decide_start(workers, Settings(backend="gloo")).warnings == ()


def test_mig_slices_are_named():
    """Slices that NCCL treats as one device are named with their GPU."""
    workers = job(mig("1"), mig("2"), nccl_version=_NEW)
    error = explained(failed(REFUSALS["2.30.7"], "refused"), decide_start(workers, Settings()), workers, "10.0.0.1")
    assert "ranks 0,1 use MIG slices of GPU-a" in str(error)
    assert error.ranks == (0, 1)


def test_devices_that_ray_does_not_count():
    plan = Decision(backend="nccl", device_type="cuda", reason="as requested")
    error = explained(failed(DUPLICATE, "refused", [0, 1], SharedDeviceError), plan, job(None, None), "10.0.0.1")
    assert "ranks 0,1 share a GPU" in str(error)
    assert "backend='gloo'" in str(error)


@pytest.mark.parametrize("kind", [StartTimeoutError, VerificationError])
def test_hang_has_its_usual_cause(kind):
    """A hang with several ranks per GPU is explained with NCCL's documentation, in the same error class."""
    plan, workers = multi_rank()
    error = explained(failed("no answer within 20 s", "stalled", [1], kind), plan, workers, "10.0.0.1")
    assert (type(error), error.ranks) == (kind, (1,))
    assert "NCCL_MAX_CTAS" in str(error)


@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (failed(kind="wrong_answer"), "nccl"),
        (failed("ncclSystemError: x", "own_failure"), "nccl"),
        (failed("connection closed"), "nccl"),
        (RendezvousError("no route to host"), "nccl"),
        (failed("no answer", "stalled"), "gloo"),
    ],
    ids=["wrong sum", "NCCL's own error", "lost peer", "firewall", "Gloo"],
)
def test_other_failures_are_unchanged(error, policy):
    """There is no advice on hangs if the collective ended, and a firewall is no refusal; neither is any error of Gloo."""
    workers = job(gpu(), gpu(), nccl_version=_NEW)
    assert explained(error, decide_start(workers, Settings(on_shared_device=policy)), workers, "10.0.0.1") is error
    assert error.advice == ""


_LISTED = (
    " Ray's address of rank 0's node is 10.8.0.2; the node also has eth0 10.0.0.1. If the nodes reach each other at another address, "
    "start Ray on each with --node-ip-address."
)
_VPN = {**network.LO, "tun0": ("10.8.0.2",), "eth0": ("10.0.0.1", "fe80::1"), "docker0": ("fe80::2",)}


@pytest.mark.parametrize(
    ("rank0", "listed"),
    [
        pytest.param(network.worker(0, "10.8.0.2", network={"interfaces": _VPN}), _LISTED, id="a VPN (vllm-metal#625)"),
        pytest.param(network.worker(0, "10.0.0.1"), "", id="a configured address"),
        pytest.param(network.worker(0, "10.8.0.2"), "", id="its only address"),
    ],
)
def test_other_addresses_of_rank_0(rank0, listed):
    """They are listed where a rank cannot reach the one that Ray knows."""
    error = UnreachableMasterError("cannot reach 10.8.0.2.", advice="Look.", ranks=(1,))
    found = explained(error, Decision(backend="gloo", device_type="cpu", reason=""), [rank0], "10.8.0.2")
    assert (found is error, found.ranks, str(found)) == (True, (1,), f"cannot reach 10.8.0.2. Look.{listed}")
