"""print() of public objects: short aligned lines with units. Their repr stays that of a dataclass."""

from dataclasses import replace

import pytest

from ray_fracbackend import DeviceCheck
from ray_fracbackend.decide.plan import Decision, StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.texts import aligned
from ray_fracbackend.decide.worker_info import NetworkInfo
from tests.unit.builders import gpu, job, mig, worker
from tests.unit.test_report import FIGURES

_RENDEZVOUS = Rendezvous(
    master_addrs=("10.0.0.1", "10.0.0.1", "10.1.0.1"),
    master_port=29500,
    init_method="env",
    one_node=False,
    uses_gloo=True,
    reason="rank 0 at 10.0.0.1:29500 (its node's address), Gloo over eth0",
    warnings=("a doubt about the network",),
)
_PLAN = StartPlan(
    backend="ipc",
    device_type="cuda",
    reason="ranks 0,1 share GPU-a: using ipc",
    fallback="gloo",
    env_defaults={"A": "1", "B": "2"},
    hints=("use 1/2",),
    warnings=("a cost",),
    rendezvous=_RENDEZVOUS,
)
_WORKER = worker(
    3,
    gpu("ab", total_memory_bytes=141 * 2**30, compute_mode="exclusive_process"),
    pid=4711,
    torch_version="2.13.0",
    ray_version="2.60.0",
    ipc_device_memory_missing=None,
    ipc_host_memory_missing="not probed",
    mps_reachable=True,
    network=NetworkInfo(interfaces={"eth0": ("10.0.0.1", "fd00::3"), "lo": ("127.0.0.1",)}),
    env={"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"},
)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        pytest.param(
            FIGURES,
            """
            verified  2 ranks over gloo on cuda:0: every result is exact
            speed     all_reduce 0.20 ms at 1 KiB, 500 MB/s at 1 MiB
            slowest   rank 1, 3.00 ms for both sizes (fastest: rank 0, 2.00 ms)
            time      12 ms for the whole verification
            """,
            id="VerificationResult",
        ),
        pytest.param(
            replace(FIGURES, world_size=1, rank_seconds=(0.002,), path="staged through host memory"),
            """
            verified  1 rank over gloo on cuda:0: every result is exact
            speed     all_reduce 0.20 ms at 1 KiB, 500 MB/s at 1 MiB
            path      staged through host memory
            time      12 ms for the whole verification
            """,
            id="VerificationResult-one-rank",
        ),
        pytest.param(
            _WORKER,
            """
            rank 3              node 10.0.0.1, host host1, pid 4711, linux
            versions            torch 2.13.0, Ray 2.60.0
            reserved            1 CPU, 0.5 GPU
            device              cuda:0 NVIDIA H200, GPU-ab, 141.0 GiB, compute mode exclusive_process
            Gloo                yes
            NCCL                2.28.9
            ipc, device memory  yes
            staged              yes
            MPS                 yes
            network             eth0 10.0.0.1, fd00::3; lo 127.0.0.1
            environment         NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=eth0
            """,
            id="WorkerInfo",
        ),
        pytest.param(
            worker(0, cuda_missing="a CPU build of torch", network=NetworkInfo(gloo_missing="no device")),
            """
            rank 0              node 10.0.0.1, host host1, pid 0, linux
            versions            torch unknown, Ray unknown
            reserved            1 CPU
            device              none: a CPU build of torch
            Gloo                no: no device
            NCCL                no: torch was built without it
            ipc, host memory    no: no ipc here
            ipc, device memory  no: no ipc here
            staged              yes
            """,
            id="WorkerInfo-cpu",
        ),
        pytest.param(mig("1"), "cuda:0 NVIDIA H200 MIG 1g.18gb, MIG-1, slice of GPU-a", id="DeviceInfo"),
        pytest.param(
            _RENDEZVOUS,
            """
            rendezvous   rank 0 at 10.0.0.1:29500 (its node's address), Gloo over eth0
            address      10.1.0.1 from rank 2
            init_method  env
            ranks        3 on several nodes
            warning      a doubt about the network
            """,
            id="Rendezvous",
        ),
        pytest.param(
            _PLAN,
            """
            backend      ipc on cuda
            reason       ranks 0,1 share GPU-a: using ipc
            fallback     gloo, if the verification fails
            environment  A=1 B=2
            rendezvous   rank 0 at 10.0.0.1:29500 (its node's address), Gloo over eth0
            warning      a cost
            warning      a doubt about the network
            hint         use 1/2
            """,
            id="StartPlan",
        ),
        pytest.param(
            DeviceCheck(
                backend="gloo",
                reason="ranks 0,2 share GPU-a: using gloo",
                share_groups=decide_start(job(gpu("a"), gpu("b"), gpu("a")), Settings()).share_groups,
                devices=(gpu("a"), gpu("b"), gpu("a")),
                env={"A": "1"},
            ),
            """
            backend      gloo
            reason       ranks 0,2 share GPU-a: using gloo
            rank 0       cuda:0 NVIDIA H200, GPU-a, shared with rank 2
            rank 1       cuda:0 NVIDIA H200, GPU-b
            rank 2       cuda:0 NVIDIA H200, GPU-a, shared with rank 0
            environment  A=1
            """,
            id="DeviceCheck",
        ),
    ],
)
def test_print(printed, text):
    """What a person reads; the repr has every field."""
    assert str(printed).splitlines() == [line.strip() for line in text.strip().splitlines()]
    assert repr(printed).startswith(f"{type(printed).__name__}(")


def test_training_on_the_cpu_and_other_fallbacks():
    """A plan says where the workers train if not where Ray placed them, and when the fallback is used."""
    plan = replace(_PLAN, backend="nccl", only_if_refused=True)
    assert "fallback     gloo, if NCCL refuses ranks that share a GPU" in str(plan)
    on_cpu = replace(_PLAN, backend="gloo", device_type="cpu", train_on_cpu=True, fallback=None)
    assert str(on_cpu).startswith("backend      gloo on cpu, instead of the GPUs that Ray reserved\n")
    assert "fallback" not in str(on_cpu)


def test_decision_of_a_real_table_row():
    """A share group and the address of a worker print as in messages."""
    decision = decide_start(job(gpu("a"), gpu("a")), Settings())
    assert isinstance(decision, Decision)
    assert str(decision.share_groups[0]) == "ranks 0,1 share GPU-a (NVIDIA H200) on node 10.0.0.1"


def test_long_texts_are_wrapped():
    """They continue in their column; a word is never cut."""
    text = aligned([("a", "word " * 30), ("longer", ""), ("bc", "x" * 120)])
    first, second, *long = text.splitlines()
    assert (first[:6], second[:6]) == ("a   wo", "    wo")
    assert len(first) <= 100
    assert "x" * 120 in long[-1]
