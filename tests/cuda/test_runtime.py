"""The emulated runtime is as strict as a GPU, or stricter: errors on a GPU are also errors here."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.cuda.emulated import run_program

LIKE_GPU = os.environ.get("CUDA_RIG_LIKE") == "gpu"
strict = pytest.mark.skipif(LIKE_GPU, reason="with --like gpu, streams may share a queue and launches may wait")

# A program that shares memory or an event with a child process by CUDA IPC, and then ends while the child holds it.
DEAD_PEER = """
import os, signal, sys, time
import torch
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(read)
    event = torch.cuda.Event(interprocess=True)
    event.record()
    torch.cuda.synchronize()
    os.write(write, event.ipc_handle())
    time.sleep(60)
handle = os.read(read, 64)
event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)
if "kill" in sys.argv:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
stream = torch.cuda.Stream()
stream.wait_event(event)
behind = torch.cuda.Event()
behind.record(stream)
time.sleep(1)
print("passed" if behind.query() else "waits", flush=True)
if "kill" not in sys.argv:
    os.kill(pid, signal.SIGKILL)
os._exit(0)
"""


# The parent frees memory that a child process has mapped, or has already unmapped.
FREED = """
import os, sys
import torch
from ray_fracbackend.ipc.device.driver import CudaRuntime
from_parent, to_child = os.pipe()
from_child, to_parent = os.pipe()
if pid := os.fork():
    torch.zeros(1, device="cuda")
    runtime = CudaRuntime(torch.device("cuda", 0))
    memory = runtime.allocate(4096)
    os.write(to_child, runtime.export(memory))
    os.read(from_child, 1)
    runtime.release(memory)
    print("freed", flush=True)
else:
    torch.zeros(1, device="cuda")
    runtime = CudaRuntime(torch.device("cuda", 0))
    memory = runtime.open(os.read(from_parent, 64), 4096)
    if "unmap" in sys.argv:
        runtime.release(memory)
    os.write(to_parent, b"x")
    os.close(to_child)
    os.read(from_parent, 1)
    os._exit(0)
"""


WORK_AFTER_FREE = """
import ctypes, torch
runtime = ctypes.CDLL(None)
torch.zeros(1, device="cuda")
p = ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(4096)) == 0
assert runtime.cudaFree(p) == 0
runtime.cudaMemsetAsync(p, 0, ctypes.c_size_t(4096), None)
torch.cuda.synchronize()
"""
FAILING_KERNEL = """
import torch
torch.zeros(4, device="cuda").gather(0, torch.tensor([7], device="cuda"))
torch.cuda.synchronize()
print("went on")
"""
SHARED_MEMORY = """
import subprocess, sys, time, torch
hold = "import time, torch; x = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print(flush=True); time.sleep(60)"
torch.cuda.init()
before = torch.cuda.mem_get_info()[0]
child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
child.stdout.readline()
held = before - torch.cuda.mem_get_info()[0]
child.kill()
child.wait()
print(held >> 20, (before - torch.cuda.mem_get_info()[0]) >> 20)
"""
READ_BY_HOST = "import ctypes, torch; x = torch.zeros(4, device='cuda'); ctypes.string_at(x.data_ptr(), 4)"
# Program, argument, exit code, and what it prints at the end of stdout, or says on stderr if it is ended.
PROGRAMS = {
    # As on a GPU, where the address is not mapped for the host.
    "the host's access to device memory": (READ_BY_HOST, "", -signal.SIGSEGV, "the host accessed device memory"),
    "work on memory after its free": (WORK_AFTER_FREE, "", -signal.SIGABRT, "was freed"),
    # A GPU's behaviour is not documented, so the worst case is used.
    "a wait for an event of another process": (DEAD_PEER, "", 0, "passed"),
    "a wait for an event of a dead process": (DEAD_PEER, "kill", 0, "waits"),
    # The documentation calls the second one undefined behaviour.
    "freed memory that another process had mapped": (FREED, "unmap", 0, "freed"),
    "freed memory that another process has mapped": (FREED, "", -signal.SIGABRT, "another process still has mapped"),
    # It is released when the other process is killed.
    "memory of another process": (SHARED_MEMORY, "", 0, f"{1024 + 300 * LIKE_GPU} 0"),
    # A test cannot continue after it.
    "a kernel that fails": (FAILING_KERNEL, "", -signal.SIGABRT, "gather"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs(case):
    """What is an error on a GPU, or undefined, ends the process."""
    program, argument, code, said = PROGRAMS[case]
    done = run_program(program, argument)
    assert done.returncode == code, done.stderr
    if code:
        assert said in done.stderr
        assert done.stdout == ""
    else:
        assert done.stdout.strip().endswith(said)


def test_fresh_and_reused_memory_holds_poison():
    """Code that reads uninitialized memory computes with NaN."""
    assert torch.empty(1000, device="cuda").cpu().isnan().all()
    x = torch.ones(1000, device="cuda")
    del x
    assert torch.empty(1000, device="cuda").cpu().isnan().all()
    assert torch.empty(1000, pin_memory=True).isnan().all()


def test_kernels_are_late():
    """The host is ahead of the device: code that does not wait reads the previous value."""
    host = torch.zeros(1, pin_memory=True)
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    x.fill_(1)
    host.copy_(x, non_blocking=True)
    assert host.item() == 0
    torch.cuda.synchronize()
    assert host.item() == 1


@strict
def test_streams_are_not_ordered_without_an_event():
    """A stream that does not wait for another reads the previous data."""
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    torch.cuda._sleep(400_000_000)
    x.fill_(1)
    with torch.cuda.stream(side):
        early = x.clone()
    torch.cuda.synchronize()
    assert early.sum().item() == 0


@strict
def test_memory_that_a_side_stream_still_reads_is_overwritten():
    """A missing record_stream is detected: the allocator reuses the memory for the next tensor, whose content is undefined."""
    side = torch.cuda.Stream()
    x = torch.ones(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        y = x.clone()
    del x
    torch.empty(1_000_000, device="cuda")
    torch.cuda.synchronize()
    assert y.isnan().all()


def test_counters_count_the_calls():
    """Bytes by direction, kernels, records, waits of streams and of the host."""
    from rig_counters import counters

    x = torch.ones(1024, device="cuda")
    host = torch.zeros(1024)
    torch.cuda.synchronize()
    before = counters()
    y = x.clone()
    y.add_(1)
    host.copy_(y)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.Stream().wait_event(event)
    torch.cuda.synchronize()
    found = counters().since(before)
    assert (found.device_copy_bytes, found.to_host_bytes, found.to_device_bytes) == (4096, 4096, 0)
    assert (found.kernels, found.kernel_bytes) == (1, 8192)
    assert (found.event_records, found.event_waits, found.contexts) == (1, 1, 0)
    assert found.host_waits >= 2


@strict
def test_a_wait_is_for_the_record_at_its_time():
    """If an event is recorded again on a faster stream, a wait for the first record still waits for the first stream."""
    slow, fast, reader = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x, event = torch.zeros(1000, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        event.record()
    reader.wait_event(event)
    event.record(fast)
    with torch.cuda.stream(reader):
        y = x.clone()
    event.synchronize()
    assert not slow.query()
    torch.cuda.synchronize()
    assert bool((y == 1).all())


# Kernels of this process and of a forked one; prints how often this one waited for its turn.
TURNS = """
import os, torch
from rig_counters import counters
pid = os.fork()
x = torch.ones(1000, device="cuda")
for _ in range(1000):
    x.add_(1)
torch.cuda.synchronize()
if pid:
    print(counters().slice_waits, flush=True)
    os.waitpid(pid, 0)
os._exit(0)
"""


@pytest.mark.parametrize("like", ["", "gpu"])
def test_processes_take_turns_like_on_a_gpu(like):
    """Without MPS one process's kernels run at a time; by default all run at once."""
    done = run_program(TURNS, CUDA_RIG_LIKE=like)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 10) == (like == "gpu")


@pytest.mark.parametrize(("visible", "count"), [("GPU-a", 1), ("GPU-", 0)])
def test_the_beginning_of_a_uuid(visible, count):
    """It names a device if it is that of no other one."""
    program = "import torch; print(torch.cuda.device_count())"
    done = run_program(program, CUDA_RIG_DEVICES="2", CUDA_RIG_MIG="0", CUDA_VISIBLE_DEVICES=visible)
    assert done.stdout.strip() == str(count)
