"""Set-up of a group: support, hosts, memory limits, processes that die during it, waiting ranks."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_calls import CALLS, bare_group, filled, memfd_count, open_memfds, options, shared_names
from ipc_harness import Job, run_ranks, values

from ray_fracbackend import ipc
from ray_fracbackend.ipc import IpcUnavailableError, host_id, host_memory_support, knobs
from ray_fracbackend.ipc.host import arena, atomics, support
from ray_fracbackend.ipc.host.liveness import Peer, start_time
from ray_fracbackend.ipc.protocol import hierarchy
from ray_fracbackend.ipc.protocol.setup import Membership


def test_support_leaves_nothing_behind() -> None:
    """The probe needs no process group and keeps no descriptor, mapping or file."""
    before, named = (len(os.listdir("/proc/self/fd")), memfd_count()), shared_names()
    assert host_memory_support() is None
    assert (len(os.listdir("/proc/self/fd")), memfd_count()) == before
    assert shared_names() <= named


@pytest.mark.parametrize(
    ("machine", "expected"), [("x86_64", None), ("riscv64", "is not one of"), ("aarch64", "libatomic.so.1")]
)
def test_support_names_a_cpu_that_cannot_be_ordered(
    monkeypatch: pytest.MonkeyPatch, machine: str, expected: str | None
) -> None:
    """A CPU without known memory ordering is refused with the reason."""
    monkeypatch.setattr(atomics.platform, "machine", lambda: machine)
    monkeypatch.setattr(atomics, "_libatomic_fence", lambda: None)
    reason = host_memory_support()
    assert (reason is None) if expected is None else (reason is not None and expected in reason)


def test_support_names_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and macOS are refused by name."""
    monkeypatch.setattr(sys, "platform", "win32")
    assert "win32" in str(host_memory_support())


def test_fences_from_libatomic_work_here() -> None:
    """The fence for weakly ordered CPUs can be called if libatomic is installed."""
    fence = atomics._libatomic_fence()
    if fence is None:
        pytest.skip("libatomic.so.1 is not installed")
    fence()


def test_place_can_be_split_but_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The override is added to the detected host, so it can never claim memory that is not shared."""
    plain = host_id()
    monkeypatch.setenv(knobs.HOST_ENV_VAR, "left")
    assert host_id() == f"{plain}/left"
    monkeypatch.setattr(support, "_BOOT_ID", Path("/nonexistent"))
    assert host_id().endswith("/left")


def test_the_old_names_of_a_host_still_work_and_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """``place_id`` and its variable; if both variables are set, the new one is used."""
    monkeypatch.setenv("RAY_FRACBACKEND_IPC_PLACE", "left")
    with pytest.warns(DeprecationWarning, match=knobs.HOST_ENV_VAR):
        assert host_id().endswith("/left")
    monkeypatch.setenv(knobs.HOST_ENV_VAR, "right")
    with pytest.warns(DeprecationWarning, match="host_id"):
        assert ipc.place_id().endswith("/right")


@pytest.mark.parametrize("text", ["", "abc", "-1", "1", str(1 << 40)])
def test_a_wrong_knob_is_refused_with_value_and_rule(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The message contains the variable, its value and the range."""
    monkeypatch.setenv(knobs.CHUNK_BYTES_ENV_VAR, text)
    with pytest.raises(ValueError, match=rf"{knobs.CHUNK_BYTES_ENV_VAR}='{text}' must be an integer from 65536"):
        knobs.chunk_bytes()


def test_an_arena_is_found_by_its_token_only() -> None:
    """A descriptor number that now refers to something else is refused, not mapped."""
    mine, name = arena.create_arena(100_000)
    try:
        assert arena.attach_arena(name).memory[:16] == mine.memory[:16]
        wrong = arena.ArenaName(name.pid, name.fd, "00" * 16, name.num_bytes)
        with pytest.raises(IpcUnavailableError, match="not the announced memory"):
            arena.attach_arena(wrong)
        larger = arena.ArenaName(name.pid, name.fd, name.token, name.num_bytes * 2)
        with pytest.raises(IpcUnavailableError, match="not the announced memory"):
            arena.attach_arena(larger)
    finally:
        os.close(name.fd)
    with pytest.raises(IpcUnavailableError, match="cannot be opened"):
        arena.attach_arena(name)


def test_an_arena_cannot_be_shrunk_under_its_users() -> None:
    """No process can truncate the memory, so no access ends in SIGBUS."""
    _, name = arena.create_arena(100_000)
    with pytest.raises(PermissionError):
        os.ftruncate(name.fd, 4096)
    os.close(name.fd)


def test_a_process_is_dead_once_it_is_a_zombie() -> None:
    """A killed rank counts as dead before its parent has waited for it; a stopped rank does not."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    peer = Peer(child.pid, start_time(child.pid))
    assert peer.is_alive()
    os.kill(child.pid, signal.SIGSTOP)
    _wait_for(lambda: peer.state() == "stopped")
    assert peer.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    _wait_for(lambda: not peer.is_alive())
    assert peer.state() == "gone"
    child.wait()
    assert not Peer(os.getpid(), start_time(os.getpid()) + 1).is_alive()


FIRST_THREAD_ENDS = """
import ctypes, platform, threading
threading.Thread(target=input).start()
print(flush=True)
exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
ctypes.CDLL(None).syscall(exit_thread, 0)
"""


def test_a_process_is_there_until_its_last_thread_has_ended() -> None:
    """A killed process keeps its memory until then, although its first thread, whose state the system shows, has ended."""
    child = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    peer = Peer(child.pid, start_time(child.pid))
    assert child.stdout is not None
    child.stdout.readline()
    _wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert peer.is_alive()
    child.communicate(b"\n", timeout=30)
    assert not peer.is_alive()


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def limited(job: Job, limit_bytes: int) -> tuple[int, float]:
    """Set up a group with a limit on file sizes, which the kernel also applies to anonymous memory files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    pg = bare_group(job, "limited", job.rank, job.size, 30.0)
    tensor = torch.arange(1_000_000.0)
    pg.allreduce([tensor], options("Allreduce"))
    return pg._local.engine.transport.chunk_bytes, tensor[-1].item()


def test_too_little_memory_leads_to_a_smaller_arena() -> None:
    """If the kernel refuses the requested size, chunks are halved until it accepts, and results stay correct."""
    for chunk_bytes, last in values(run_ranks(limited, 2, 1_000_000, limit_s=120)):
        assert knobs.MIN_CHUNK_BYTES <= chunk_bytes < knobs.DEFAULT_CHUNK_BYTES
        assert last == 2 * 999_999


def test_much_too_little_memory_is_an_error_on_every_rank() -> None:
    """No SIGBUS and no hang: each rank raises an error with the failed rank and the kernel's message."""
    for outcome in run_ranks(limited, 3, 100_000, limit_s=120):
        assert isinstance(outcome.error, IpcUnavailableError)
        assert "rank 0" in str(outcome.error)
        assert "the kernel" in str(outcome.error)


def set_up(job: Job) -> float:
    """Set up a group and compute sums large enough for two passes."""
    pg = bare_group(job, "knobs", job.rank, job.size, 30.0)
    tensor = torch.full((40_000,), float(job.rank + 1))
    pg.allreduce([tensor], options("Allreduce")).wait()
    return tensor.sum().item() / 40_000


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (knobs.SPIN_US_ENV_VAR, "an integer from 0"),
        (knobs.CHUNK_BYTES_ENV_VAR, "an integer from 65536"),
        (knobs.ONE_PASS_BYTES_ENV_VAR, "an integer from 0"),
        (knobs.DEVICE_CHUNK_BYTES_ENV_VAR, "an integer from 65536"),
        (knobs.DEVICE_ONE_PASS_BYTES_ENV_VAR, "an integer from 0"),
        (knobs.DEVICE_REDUCE_ENV_VAR, "'leader' or 'split'; unset it for 'leader'"),
        (knobs.DEVICE_PATH_ENV_VAR, "'auto', 'memory' or 'staged'; unset it for 'auto'"),
    ],
)
def test_a_wrong_knob_of_one_rank_is_an_error_on_every_rank(name: str, rule: str) -> None:
    """The others do not wait for a rank that has raised; wrong knobs of device memory raise before any device tensor is used."""
    env = lambda rank: {name: "abc"} if rank == 0 else {}  # noqa: E731
    for outcome in run_ranks(set_up, 3, limit_s=60, env=env):
        assert isinstance(outcome.error, IpcUnavailableError), outcome.error
        assert "rank 0" in str(outcome.error)
        assert f"{name}='abc' must be {rule}" in str(outcome.error)


def test_ranks_with_different_knobs_compute_the_same() -> None:
    """A value that must be equal on all ranks is decided by one rank, or cannot be set by a rank."""
    different = ["2", "100", "3"]
    env = lambda rank: {  # noqa: E731
        "RAY_FRACBACKEND_IPC_TWO_PASS_RANKS": different[rank],
        knobs.SPIN_US_ENV_VAR: different[rank],
        knobs.CHUNK_BYTES_ENV_VAR: str(65536 * (rank + 1)),
        knobs.ONE_PASS_BYTES_ENV_VAR: ["0", "1000000", "1000"][rank],
    }
    assert values(run_ranks(set_up, 3, limit_s=60, env=env)) == [6.0] * 3


SMALL_SHM = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -m torch.distributed.run --standalone --nproc-per-node 2 "$1"
"""
SMALL_SHM_SCRIPT = """
import os, torch, torch.distributed as dist
import ray_fracbackend.ipc
dist.init_process_group("ipc")
x = torch.ones(10_000_000)
dist.all_reduce(x)
assert x[-1] == 2.0
open(f"{__file__}.{dist.get_rank()}", "w").write(str(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize))
"""


@pytest.mark.full
def test_the_size_of_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """A 64 KiB /dev/shm, smaller than any container's, is enough, because the memory is not in it."""
    script = tmp_path / "script.py"
    script.write_text(SMALL_SHM_SCRIPT)
    command = ["unshare", "--mount", "sh", "-c", SMALL_SHM, sys.executable, str(script)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("mounting needs privileges")
    assert done.returncode == 0, done.stderr
    assert [Path(f"{script}.{rank}").read_text() for rank in (0, 1)] == ["65536", "65536"]


def set_up_forever(job: Job, seed: int) -> None:
    """Create, use and drop groups until killed; each rank is killed at a different random moment."""
    rng = random.Random(f"{seed}/{job.rank}")
    threading.Timer(0.05 + rng.random() * 0.6, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    torch.set_num_threads(1)
    for number in range(1000):
        bare_group(job, str(number), job.rank, job.size, 30.0).barrier(options("Barrier"))


@pytest.mark.parametrize("seed", range(3))
def test_killing_all_ranks_during_setup_leaves_nothing(seed: int) -> None:
    """Whatever the moment of each rank's death, no file is left, and no process still maps the memory."""
    before = shared_names()
    outcomes = run_ranks(set_up_forever, 3, seed, limit_s=20)
    assert not [o for o in outcomes if o.returned]
    assert shared_names() <= before


def release(job: Job) -> tuple[int, int, int, int]:
    """Return descriptors and mappings of shared memory while a group is used and after it is dropped."""
    pg = bare_group(job, "release", job.rank, job.size, 30.0)
    for call in CALLS.values():
        call(pg)
    during = (open_memfds(), memfd_count())
    pg.shutdown()
    del pg, call
    import gc

    gc.collect()
    return (*during, open_memfds(), memfd_count())


def test_a_dropped_group_frees_its_memory() -> None:
    """One mapping and the descriptor that mmap keeps while it lives; none after it is dropped."""
    assert values(run_ranks(release, 2, limit_s=120)) == [(1, 1, 0, 0)] * 2


def late_peer(job: Job) -> tuple[float, float, int]:
    """Rank 0 waits a second for rank 1; return CPU and wall seconds of the wait and the progress of another thread."""
    pg = bare_group(job, "late", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    if job.rank == 1:
        time.sleep(1.0)
        pg.barrier(options("Barrier"))
        return 0.0, 0.0, 0
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    wall, cpu = time.monotonic(), time.thread_time()
    pg.barrier(options("Barrier"))
    wall, cpu = time.monotonic() - wall, time.thread_time() - cpu
    stop.set()
    thread.join()
    return wall, cpu, ticks


def test_waiting_for_a_late_rank_leaves_the_core_and_the_interpreter_free() -> None:
    """A second of waiting uses a few percent of a core, and other Python threads run meanwhile."""
    wall, cpu, ticks = values(run_ranks(late_peer, 2, limit_s=120))[0]
    assert wall > 0.5
    assert cpu < 0.25 * wall
    assert ticks > 50


def names_of_global_ranks(job: Job) -> Any:
    """Return the message of a timeout in a sub-group."""
    pg = bare_group(job, "named", job.rank, job.size, 20.0, (4, 7))
    pg.set_timeout(timedelta(seconds=0.2))
    if job.rank == 0:
        with pytest.raises(RuntimeError) as info:
            pg.allreduce([filled(3)], options("Allreduce"))
        return str(info.value)
    time.sleep(1.0)
    return ""


def test_messages_name_global_ranks() -> None:
    """A sub-group of ranks 4 and 7 names rank 7, not its own rank 1."""
    assert "rank 7 (pid" in values(run_ranks(names_of_global_ranks, 2, limit_s=120))[0]


def late_leader(job: Job) -> bool:
    """Return whether both leaders' connections were open when this rank had finished with them."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60))
    connect = hierarchy.ProcessGroupGloo

    def slowly(*args: Any) -> Any:
        group = connect(*args)
        time.sleep(1.0)
        store.set("connected", "")
        return group

    if job.rank == 1:
        hierarchy.ProcessGroupGloo = slowly
    hierarchy.gloo_leaders(store, Membership(job.rank, ((0,), (1,)), ("rank 0", "rank 1")), timedelta(seconds=60))
    return bool(store.check(["connected"]))


def test_no_leader_is_through_before_all_are_connected() -> None:
    """A rank that leaves at once would close the connection while another one still connects, which would see a broken network."""
    assert values(run_ranks(late_leader, 2, limit_s=120)) == [True, True]


def test_a_torch_that_cannot_hold_python_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.7 a wait for functional collectives would never end, so the backend is refused."""
    assert support.HAS_PYTHON_GROUPS
    monkeypatch.setattr(support, "HAS_PYTHON_GROUPS", False)
    assert "the ipc backend needs torch 2.7" in str(host_memory_support())


def pairs(job: Job) -> list[str]:
    """Return rank 0's log lines for groups by name and by pair."""
    job.init()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ray_fracbackend.ipc.group.collective_group").addHandler(handler)
    for backend in ("ipc", "cpu:ipc", "cpu:gloo,cuda:ipc", "cpu:gloo"):
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend=backend))
    return [text.partition(",")[0] for text in texts if "requested as" in text]


def test_a_pair_with_another_backend_is_logged_as_ipc() -> None:
    """torch passes every device's tensors to ipc there; the log says so once, at the first collective."""
    first, second = values(run_ranks(pairs, 2))
    assert first == ["ray_fracbackend: this process group was requested as cpu:gloo"]
    assert second == []


def split(job: Job) -> str:
    """Return the error of splitting a group."""
    job.init()
    try:
        dist.group.WORLD.split_group([0, 1])
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_splitting_a_group_is_an_error() -> None:
    """torch's own method would end the process with a segmentation fault."""
    assert all("create the subgroup with torch.distributed.new_group" in text for text in values(run_ranks(split, 2)))


def new_limit(job: Job) -> list[float]:
    """Return time limits of the parts of a group with two hosts after torch's function has set another one."""
    job.init()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    dist.all_reduce(torch.ones(1))
    group: Any = dist.group.WORLD
    return [
        group._timeout_s,
        group._leaders.options._timeout.total_seconds(),
    ]


def test_a_new_time_limit_reaches_every_part() -> None:
    """The group of the hosts' first ranks uses the limit that torch sets on the inner one."""
    found = values(run_ranks(new_limit, 2, env=lambda rank: {"RAY_FRACBACKEND_IPC_HOST": str(rank)}))
    assert found == [[7.0] * 2] * 2
