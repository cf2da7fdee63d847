"""Set-up of a group: support, hosts, memory limits, processes that die during it, waiting ranks; and its memory in a long run."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from ipc_calls import bare_group, error_of, filled, options, shared_names
from ipc_harness import Job, on_ranks, run_ranks, values
from ipc_workloads import overlap

from ray_fracbackend import ipc
from ray_fracbackend.ipc import CollectiveTimeoutError, IpcUnavailableError, host_memory_support, knobs
from ray_fracbackend.ipc.group.process_group import IpcProcessGroup
from ray_fracbackend.ipc.host import arena, atomics, support
from ray_fracbackend.ipc.host.liveness import Peer, start_time
from ray_fracbackend.ipc.protocol import setup
from tests.processes import wait_until
from tests.soak.belongings import belongings

_PAGE = Path(__file__).parents[2] / "docs" / "environment.md"


def test_support_leaves_nothing_behind() -> None:
    """The probe needs no process group and keeps no descriptor, mapping or file."""
    before, named = belongings(), shared_names()
    assert host_memory_support() is None
    assert [name for name in ("descriptors", "shared_memory") if belongings()[name] != before[name]] == []
    assert shared_names() <= named


@pytest.mark.parametrize(
    ("support_of", "owner", "name", "value", "reason"),
    [
        (host_memory_support, atomics.platform, "machine", lambda: "x86_64", None),
        (
            host_memory_support,
            atomics.platform,
            "machine",
            lambda: "aarch64",
            "'aarch64': the ipc backend needs 64-bit x86",
        ),
        (host_memory_support, sys, "platform", "win32", "win32"),
        # A wait for functional collectives would never end.
        (host_memory_support, support, "HAS_PYTHON_GROUPS", False, "torch 2.7"),
        # What tests/gpu finds out needs a device.
        (ipc.device_memory_support, sys, "platform", "win32", "win32"),
        (ipc.device_memory_support, platform, "release", lambda: "5.10.120-tegra", "Tegra"),
        (ipc.device_memory_support, torch.version, "cuda", None, "without CUDA"),
        (ipc.device_memory_support, torch.cuda, "is_available", lambda: False, "no CUDA device"),
        (ipc.device_memory_support, torch.cuda, "device_count", lambda: 0, "no device 0"),
    ],
)
def test_support_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, support_of: Any, owner: Any, name: str, value: Any, reason: str | None
) -> None:
    """A CPU without known memory ordering, another system, an older torch, no device."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(owner, name, value)
    found = support_of()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("backend", ["ipc", "staged"])
@on_ranks(3)
def test_ranks_on_several_hosts(job: Job, backend: str) -> None:
    """ipc is for those of one, and says so on every rank; staged uses Gloo."""
    setup.host_id = lambda: "aba"[job.rank]
    if backend == "ipc":
        with pytest.raises(IpcUnavailableError, match="the ranks are on 2 hosts; use the staged or the gloo backend"):
            job.init(backend)
        return
    job.init(backend)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor.tolist(), dist.group.WORLD.over) == ([3.0] * 3, "gloo")  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "abc", "-1", "1", str(1 << 40)])
def test_a_wrong_knob_is_refused_with_value_and_rule(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The message contains the variable, its value and the range."""
    monkeypatch.setenv(knobs.CHUNK_BYTES_ENV_VAR, text)
    with pytest.raises(ValueError, match=rf"{knobs.CHUNK_BYTES_ENV_VAR}='{text}' must be an integer from 65536"):
        knobs.chunk_bytes()


@pytest.mark.parametrize(
    "name", re.findall(r"^\| `(RAY_FRACBACKEND_(?:IPC|STAGED)_\w+)`", _PAGE.read_text(encoding="utf-8"), re.M)
)
def test_every_variable_of_the_page_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert knobs.invalid_value() is None
    monkeypatch.setenv(name, "1M")
    assert str(knobs.invalid_value()).startswith(f"{name}='1M' must be ")


def test_an_arena_is_found_by_its_token_and_size_only() -> None:
    """A descriptor number that now refers to something else is refused, not mapped; nobody can shrink the memory under its users."""
    mine, name = arena.create_arena(100_000)
    not_sealed, (_, other) = os.memfd_create("ray_fracbackend_ipc"), arena.create_arena(4096)
    os.truncate(not_sealed, name.num_bytes)
    os.write(not_sealed, mine.memory[:16])
    try:
        found = arena.attach_arena(name)
        os.close(found.fd)
        assert found.memory[:16] == mine.memory[:16]
        wrong = {"token": "00" * 16}, {"num_bytes": name.num_bytes * 2}, {"num_bytes": 4096}, {"fd": not_sealed}
        for change in wrong:
            with pytest.raises(IpcUnavailableError):
                arena.attach_arena(replace(name, **change))
        if os.geteuid() == 0:  # who could open it
            os.fchown(other.fd, 4242, -1)
            with pytest.raises(IpcUnavailableError):
                arena.attach_arena(other)
        with pytest.raises(PermissionError):  # no access ends in SIGBUS
            os.ftruncate(name.fd, 4096)
        assert not os.fstat(name.fd).st_mode & 0o111 or tuple(map(int, platform.release().split(".")[:2])) < (6, 3)
    finally:
        os.close(name.fd)
        os.close(not_sealed)
        os.close(other.fd)
    with pytest.raises(IpcUnavailableError):
        arena.attach_arena(name)


@on_ranks(2)
def test_a_record_of_a_stranger_opens_no_file(job: Job) -> None:
    """Whoever reaches the store can name a descriptor of a rank: both ranks have the error at once, and the file stays as it was."""
    token, num_bytes, read = b"sixteen bytes ok", 1 << 20, setup._record
    with tempfile.TemporaryFile() as file:
        file.write(token.ljust(num_bytes, b"."))
        file.flush()
        name = arena.ArenaName(os.getpid(), file.fileno(), token.hex(), num_bytes)

        def read_later(store: Any, key: str, types: Any) -> Any:
            if key == "arena":
                store.wait([key])
                store.set(key, json.dumps({**asdict(name), "error": None}))
            return read(store, key, types)

        with (
            mock.patch.object(setup, "_record", read_later),
            pytest.raises(IpcUnavailableError, match="rank 1: /proc/"),
        ):
            bare_group(job, "stranger", job.rank, job.size, 60.0)
        file.seek(0)
        assert file.read() == token.ljust(num_bytes, b".")


def started(code: str) -> subprocess.Popen[str]:
    """Return a process that runs code: `Popen` returns within ``exec``, before the process has its stack."""
    command = [sys.executable, "-c", f"print(flush=True); {code}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_a_process_is_dead_once_it_is_a_zombie() -> None:
    """A killed rank counts as dead before its parent has waited for it; a stopped rank does not."""
    child = started("import time; time.sleep(60)")
    peer = Peer(child.pid, start_time(child.pid))
    assert peer.is_alive()
    child.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: peer.state() == "stopped")
    assert peer.is_alive()
    child.kill()
    assert wait_until(lambda: not peer.is_alive())
    assert peer.state() == "gone"
    child.wait()
    assert not Peer(os.getpid(), start_time(os.getpid()) + 1).is_alive()


def test_a_process_is_gone_once_it_runs_another_program() -> None:
    """It has the same pid and start time after ``exec``, and none of the shared memory."""
    child = started("import os, sys; input(); os.execv(sys.executable, [sys.executable, '-c', 'input()'])")
    peer = Peer(child.pid, start_time(child.pid))
    assert peer.is_alive()
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    assert wait_until(lambda: not peer.is_alive())
    assert Peer(child.pid, peer.started).is_alive()
    child.communicate("\n", timeout=30)


FIRST_THREAD_ENDS = """
import ctypes, platform, threading
threading.Thread(target=input).start()
print(flush=True)
exit_thread = 60
ctypes.CDLL(None).syscall(exit_thread, 0)
"""


def test_a_process_is_there_until_its_last_thread_has_ended() -> None:
    """A killed process keeps its memory until then, although its first thread, whose state the system shows, has ended."""
    child = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    peer = Peer(child.pid, start_time(child.pid))
    assert child.stdout is not None
    child.stdout.readline()
    stat = Path(f"/proc/{child.pid}/stat")
    assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert peer.is_alive()
    child.communicate(b"\n", timeout=30)
    assert not peer.is_alive()


def allocations(job: Job) -> list[tuple[int, int, bool]]:
    """Set up a group, and return what this rank allocates of its memory: start, end, whether nobody had touched it."""
    spans, allocate = [], os.posix_fallocate

    def recorded(fd: int, start: int, num_bytes: int) -> None:
        if os.fstat(fd).st_size > knobs.MIN_CHUNK_BYTES:  # not the memory with which support is tried
            spans.append((start, start + num_bytes, os.lseek(fd, start, os.SEEK_HOLE) == start))
        allocate(fd, start, num_bytes)

    with mock.patch.object(os, "posix_fallocate", recorded):
        bare_group(job, "allocations", job.rank, job.size, 30.0)
    return spans


def test_each_rank_allocates_its_own_memory() -> None:
    """Its slots are on its NUMA node, and no page is left for a later access, which could raise SIGBUS."""
    by_rank = values(run_ranks(allocations, 3))
    starts, ends, untouched = zip(*sorted(span for spans in by_rank for span in spans), strict=True)
    assert [len(spans) for spans in by_rank] == [3, 2, 2]
    assert starts == (0, *ends[:-1])
    assert ends[-1] == setup._arena_bytes(3, knobs.chunk_bytes(), knobs.num_slots())
    assert all(untouched)


def without_memory(job: Job) -> None:
    """Set up a group for whose last rank the kernel has no memory."""
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if job.rank == 2 else nullcontext(), mock.patch.object(setup, "host_memory_support", return_value=None):
        bare_group(job, "full", job.rank, job.size, 30.0)


def limited(job: Job) -> None:
    """Set up a group with a limit on file sizes, which the kernel also applies to anonymous memory files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    bare_group(job, "limited", job.rank, job.size, 30.0)


@pytest.mark.parametrize(("function", "rank"), [(limited, 0), (without_memory, 2)])
def test_too_little_memory(function: Callable[[Job], None], rank: int) -> None:
    """Every rank has an error with the failed rank and what to set: no SIGBUS, no hang."""
    for outcome in run_ranks(function, 3):
        assert isinstance(outcome.error, IpcUnavailableError)
        assert f"rank {rank}" in str(outcome.error)
        assert knobs.SLOTS_ENV_VAR in str(outcome.error)


@on_ranks(2)
def test_the_limit_for_late_ranks_is_the_groups(job: Job) -> None:
    """And not that of the store, which may be shorter."""
    store = job.store()
    store.set_timeout(timedelta(seconds=1))
    time.sleep(3 * job.rank)
    IpcProcessGroup(store, job.rank, 2, timedelta(seconds=30)).barrier().wait()


def test_ranks_that_do_not_come_are_named() -> None:
    """torch's own text lists the store's keys of all ranks."""
    store = dist.HashStore()
    store.set("ipc/0/here/1", "")
    with pytest.raises(CollectiveTimeoutError, match="rank 6, rank 7 did not create the process group"):
        IpcProcessGroup(store, 0, 4, timedelta(seconds=0.1), (4, 5, 6, 7))


def test_the_first_message_with_a_rank_that_has_ended() -> None:
    """Gloo's error at once, in groups of either order of the ranks' ports."""
    errors = values(run_ranks(first_messages, 2, limit_s=60, needed=1)[:1])[0]
    assert all("Connection" in error for error in errors), errors


def first_messages(job: Job) -> list[str]:
    """Rank 1 ends without a message; return the errors of rank 0's messages."""
    job.init(timeout=timedelta(seconds=600))
    groups = [dist.new_group() for _ in range(8)]
    dist.barrier()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    return [error_of(lambda g=group: dist.send(torch.ones(4), 1, group=g))[1] for group in groups]


def set_up(job: Job, name: str = "knobs") -> float:
    """Set up a group and compute sums large enough for two passes."""
    pg = bare_group(job, name, job.rank, job.size, 30.0)
    tensor = torch.full((40_000,), float(job.rank + 1))
    pg.allreduce([tensor], options("Allreduce")).wait()
    return tensor.sum().item() / 40_000


KNOBS = [value for name, value in vars(knobs).items() if name.endswith("_ENV_VAR") and "STAGED" not in name]


@on_ranks(3)
def test_a_wrong_knob_of_one_rank_is_an_error_on_every_rank(job: Job) -> None:
    """The others do not wait for a rank that has raised; wrong knobs of device memory raise before any device tensor is used."""
    for name in KNOBS:
        wrong = {name: "abc"} if job.rank == 0 else {}
        text = f"rank 0.*{name}='abc' must be "
        with mock.patch.dict(os.environ, wrong), pytest.raises(IpcUnavailableError, match=text):
            set_up(job, name)


def test_ranks_with_different_knobs_compute_the_same() -> None:
    """A value that must be equal on all ranks is decided by one rank, or cannot be set by a rank."""
    different = ["2", "100", "3"]
    env = lambda rank: {  # noqa: E731
        knobs.SPIN_US_ENV_VAR: different[rank],
        knobs.CHUNK_BYTES_ENV_VAR: str(65536 * (rank + 1)),
        knobs.ONE_PASS_BYTES_ENV_VAR: ["0", "1000000", "1000"][rank],
    }
    assert values(run_ranks(set_up, 3, limit_s=60, env=env)) == [6.0] * 3


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


@on_ranks(2)
def test_messages_name_global_ranks(job: Job) -> None:
    """A sub-group of ranks 4 and 7 names rank 7, not its own rank 1."""
    pg = bare_group(job, "named", job.rank, job.size, 20.0, (4, 7))
    pg.set_timeout(timedelta(seconds=0.2))
    if job.rank == 1:
        time.sleep(1.0)
        return
    with pytest.raises(CollectiveTimeoutError, match=r"rank 7 \(pid"):
        pg.allreduce([filled(3)], options("Allreduce"))


@on_ranks(2)
def test_a_pair_with_another_backend_is_logged_as_ipc(job: Job) -> None:
    """torch passes every device's tensors to ipc there; rank 0's log says so once, at the first collective."""
    job.init()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ray_fracbackend.ipc.group.collective_group").addHandler(handler)
    for backend in ("ipc", "cpu:ipc", "cpu:gloo,cuda:ipc", "cpu:gloo"):
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend=backend))
    assert len([text for text in texts if "requested as cpu:gloo," in text]) == (job.rank == 0)


@on_ranks(2)
def test_splitting_a_group_is_an_error(job: Job) -> None:
    """torch's own method would end the process with a segmentation fault."""
    job.init()
    with pytest.raises(RuntimeError, match="new_group"):
        dist.group.WORLD.split_group([0, 1])  # type: ignore[union-attr]


def private_bytes() -> int:
    """Return the memory of this process that is not shared, without what the C library keeps of freed tensors."""
    ctypes.CDLL(None).malloc_trim(0)
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


@pytest.mark.full
@pytest.mark.parametrize(("size", "num_calls"), [(2, 3000), (2, 100_000), (3, 100_000)])
@on_ranks(limit_s=550)
def test_many_collectives_are_exact_and_leak_no_memory(job: Job, size: int, num_calls: int) -> None:
    """Small and large ones on two groups; the memory of a process that is not shared stays."""
    job.init()
    groups, sizes = [dist.new_group(), dist.new_group()], (*range(1, 2000, 20), 1_000_003)
    overlap(job, groups, num_calls // 5, sizes)
    before = private_bytes()
    overlap(job, groups, num_calls, sizes)
    assert private_bytes() - before < 8 << 20
