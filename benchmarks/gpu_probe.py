"""Test on a GPU whether the features that ipc needs work between two processes, and their cost. Under a minute.

usage: python benchmarks/gpu_probe.py [--questions ...] [--budget-s 75] [--dry] [--out FOLDER]

Each question runs in two separate processes, so one that fails or hangs loses only its own answer:

``identity``   the device's UUID from the driver and from the runtime (they may differ on a MIG slice), and its properties
``memory``     is memory that the other process exported correct, and how long do export and opening take?
``event``      microseconds per hop: a stream waits for the other process's interprocess event, runs a small kernel and records its own
               event; and microseconds of the hosts' part, a message by pipe
``semaphore``  the same with words (cuStreamBatchMemOp) and no host in between: in mapped device memory, and in
               registered host memory, as in ipc
``copy``       a copy and an addition of 64 MiB, with an idle GPU and with another process's kernels on it: does a copy wait for their turn?
``killed``     a process is killed after recording an event that is not reached: does a stream that waits for it become free? Does a stream
               that waits for a word of the host become free when the host writes the word?
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import parser, save
from rows import Rows, add_row, gpu_state

from ray_fracbackend.ipc.device import driver
from ray_fracbackend.ipc.device.driver import CudaRuntime
from ray_fracbackend.ipc.host.arena import Arena, attach_arena, create_arena

_BLOCK_BYTES = 256 << 20
_PAGE_BYTES = 4096
_COPIED_BYTES = 64 << 20
# If each costs a time slice of two milliseconds, all runs of them end within the limit of a question.
_EVENT_HOPS = 400
_SEMAPHORE_HOPS = 400
_BUSY_S = 4.0
# About one and a half seconds on a GPU with 2 GHz.
_LONG_CYCLES = 3_000_000_000
_STUCK_S = 8.0
_MEET_S = 15.0
_FACT_S = 10.0
_QUESTION_S = 20.0
_FACTS = (
    "nvidia-smi",
    "nvidia-smi --query-gpu=name,uuid,driver_version,compute_mode,mig.mode.current,clocks.sm --format=csv",
    "nvidia-smi compute-policy --list",
    "df -h /dev/shm",
    "ulimit -l",
    "nproc",
    "uname -r",
)


class Side:
    """One of the two processes of a question.

    Attributes:
        rank: 0 or 1.
        runtime: The device.
        stream: Stream of this process.
    """

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self._pipe = rank, pipe
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        self.runtime = CudaRuntime(torch.device("cuda", 0))
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    def meet(self, value: Any = None) -> Any:
        """Pass a value to the other process and return its value."""
        self._pipe.send(value)
        return self.receive()

    def send(self, value: Any = None) -> None:
        """Send a value to the other process."""
        self._pipe.send(value)

    def receive(self) -> Any:
        """Wait for a value of the other process."""
        if not self._pipe.poll(_MEET_S):
            raise RuntimeError(f"the other process did not answer within {_MEET_S:g} s")
        return self._pipe.recv()

    def shared(self) -> tuple[driver.DeviceBlock, driver.DeviceBlock]:
        """Allocate a block, and open the other process's block."""
        block = self.runtime.allocate(_BLOCK_BYTES)
        return block, self.runtime.open(self.meet(self.runtime.export(block)), _BLOCK_BYTES)


def identity(side: Side) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "uuid_of_driver": side.runtime.uuid(),
        "uuid_of_runtime": str(getattr(properties, "uuid", None)),
        "has_timelines": driver.has_timelines(0),
        "num_multiprocessors": properties.multi_processor_count,
        "total_bytes": properties.total_memory,
    }


def memory(side: Side) -> dict[str, Any]:
    block = side.runtime.allocate(_BLOCK_BYTES)
    block.bytes.fill_(side.rank + 1)
    torch.cuda.synchronize()
    started = time.perf_counter()
    handle = side.runtime.export(block)
    exported = time.perf_counter()
    theirs = side.meet(handle)
    opening = time.perf_counter()
    peer = side.runtime.open(theirs, _BLOCK_BYTES)
    opened = time.perf_counter()
    right = bool((peer.bytes == 2 - side.rank).all())
    side.meet()
    return {
        "is_right": right,
        "export_us": round((exported - started) * 1e6, 1),
        "open_us": round((opened - opening) * 1e6, 1),
    }


def event(side: Side) -> dict[str, Any]:
    number = torch.zeros(1, device="cuda")
    own = [shared_event() for _ in (0, 1)]
    theirs = [open_event(handle) for handle in side.meet([one.ipc_handle() for one in own])]
    files = sorted(map(os.path.basename, glob.glob("/dev/shm/cuda*")))

    def microseconds(on_device: bool) -> float:
        side.meet()
        started = time.perf_counter()
        for hop in range(side.rank, _EVENT_HOPS, 2):
            if hop:
                side.receive()
            if on_device:
                if hop:
                    side.stream.wait_event(theirs[(hop - 1) // 2 % 2])
                number.add_(1)
                own[hop // 2 % 2].record()
            side.send()
        if side.rank == 0:
            side.receive()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / _EVENT_HOPS * 1e6

    microseconds(True)
    hops = {name: [microseconds(name == "hop_us") for _ in range(3)] for name in ("hop_us", "hop_of_hosts_alone_us")}
    side.meet()
    return {name: round(statistics.median(values), 2) for name, values in hops.items()} | {"files_in_dev_shm": files}


def shared_event() -> Any:
    """Return a recorded event: before it is recorded it has no handle."""
    one = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    one.record()
    return one


def open_event(handle: bytes) -> Any:
    return torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)  # type: ignore[no-untyped-call]


def shared_words(side: Side) -> tuple[Arena, int]:
    """Return a page of host memory of both processes, and its address on the device."""
    if side.rank == 0:
        arena, name = create_arena(_PAGE_BYTES)
        side.meet(name)
    else:
        arena = attach_arena(side.meet())
    side.meet()
    os.close(arena.fd)
    return arena, side.runtime.register(arena.address, _PAGE_BYTES)


def semaphore(side: Side) -> dict[str, Any]:
    block, peer = side.shared()
    block.bytes[:16].zero_()
    torch.cuda.synchronize()
    _, words = shared_words(side)
    own, theirs = (words + 64 * (1 + (side.rank ^ other)) for other in (0, 1))
    return {
        "hop_us": hop_by_words(side, block.pointer, peer.pointer),
        "hop_in_host_memory_us": hop_by_words(side, own, theirs),
    }


def hop_by_words(side: Side, own: int, theirs: int) -> float:
    """Return the microseconds of a hop with these two words."""
    number, runtime, stream = torch.zeros(1, device="cuda"), side.runtime, side.stream
    microseconds, turn = [], 0
    for _ in range(4):
        side.meet()
        started = time.perf_counter()
        for _ in range(_SEMAPHORE_HOPS // 2):
            turn += 1
            if side.rank:
                runtime.wait_for_words(stream, {theirs: turn})
            number.add_(1)
            runtime.write_words(stream, {own: turn})
            if not side.rank:
                runtime.wait_for_words(stream, {theirs: turn})
        torch.cuda.synchronize()
        microseconds.append((time.perf_counter() - started) / _SEMAPHORE_HOPS * 1e6)
    side.meet()
    return round(statistics.median(microseconds[1:]), 2)


def copy(side: Side) -> dict[str, Any]:
    block, _ = side.shared()
    source, target = block.bytes[:_COPIED_BYTES], block.bytes[_BLOCK_BYTES // 2 :][:_COPIED_BYTES]

    def timed(call: Callable[[], Any], count: int) -> float:
        call()
        torch.cuda.synchronize()
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return round(statistics.median(seconds) * 1e6, 1)

    found = {}
    copying: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "add": lambda: torch.add(source.view(torch.float32), 1, out=target.view(torch.float32)),
    }
    if side.rank == 1:
        found = {f"{name}_idle_us": timed(call, 30) for name, call in copying.items()}
    side.meet()
    if side.rank == 0:
        factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        end = time.monotonic() + _BUSY_S
        while time.monotonic() < end:
            for _ in range(20):
                factor @ factor
            torch.cuda.synchronize()
    else:
        time.sleep(1)
        found |= {f"{name}_beside_kernels_us": timed(call, 30) for name, call in copying.items()}
    side.meet()
    return found


def killed(side: Side) -> dict[str, Any]:
    own = shared_event()
    theirs = open_event(side.meet(own.ipc_handle()))
    arena, words = shared_words(side)
    if side.rank == 1:
        torch.cuda._sleep(_LONG_CYCLES)
        own.record()
        side.send()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    side.receive()
    behind_word = torch.cuda.Stream()
    side.runtime.wait_for_words(behind_word, {words + 64: 1})
    is_held = not behind_word.query()
    memoryview(arena.memory).cast("q")[8] = 1
    released_s = until_free(behind_word)
    side.stream.wait_event(theirs)
    torch.zeros(1, device="cuda").add_(1)
    free_s = until_free(side.stream)
    return {
        "comes_free": side.stream.query(),
        "after_s": free_s,
        "is_held_by_a_word": is_held,
        "comes_free_by_the_host": behind_word.query(),
        "after_the_host_s": released_s,
        "files_in_dev_shm": sorted(map(os.path.basename, glob.glob("/dev/shm/cuda*"))),
    }


def until_free(stream: Any) -> float:
    """Return the seconds until a stream is idle, or until the time limit."""
    started = time.monotonic()
    while not stream.query() and time.monotonic() - started < _STUCK_S:
        time.sleep(0.01)
    return round(time.monotonic() - started, 2)


QUESTIONS: dict[str, Callable[[Side], dict[str, Any]]] = {
    each.__name__: each for each in (identity, memory, event, semaphore, copy, killed)
}


def answer(question: str, rank: int, pipe: Connection) -> None:
    """Run one process's part; exit without the interpreter's teardown, which would wait for a stuck stream."""
    try:
        found = QUESTIONS[question](Side(rank, pipe))
    except BaseException as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:500]}
    if found:
        add_row("gpu_probe", {"question": question, "process": rank, **found})
    os._exit(0)


def ask(question: str, limit_s: float) -> str | None:
    """Return why there is no complete answer within the limit, None if there is one."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    processes = [context.Process(target=answer, args=(question, rank, ends[rank])) for rank in (0, 1)]
    for process, own in zip(processes, ends, strict=True):
        process.start()
        own.close()  # else a process whose peer has ended would wait for it
    end, late = time.monotonic() + limit_s, []
    for rank, process in enumerate(processes):
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            late.append(rank)
            process.kill()
            process.join()
    return f"process {late[0]} did not end within {limit_s:.0f} s" if late else None


def facts() -> dict[str, str]:
    """Return information about the machine, by command."""
    found = {"mps": shutil.which("nvidia-cuda-mps-control") or "not installed"}
    for command in _FACTS:
        try:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=_FACT_S, check=False)
            found[command] = (done.stdout or done.stderr).strip()[-4000:]
        except subprocess.TimeoutExpired:
            found[command] = f"did not end within {_FACT_S:g} s"
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dry", action="store_true", help="facts alone, without a GPU")
    options.add_argument("--budget-s", type=float, default=75.0, help="seconds for everything")
    options.add_argument("--questions", nargs="+", default=list(QUESTIONS), choices=QUESTIONS)
    arguments = options.parse_args()
    end = time.monotonic() + arguments.budget_s
    rows = Rows("gpu_probe")
    rows.add(facts=facts())
    for question in arguments.questions:
        left_s = end - time.monotonic()
        reason = (
            "dry"
            if arguments.dry
            else "not run: the budget is spent"
            if left_s < 2
            else ask(question, min(left_s, _QUESTION_S))
        )
        if reason:
            rows.add(question=question, failed=reason)
        if question == "killed":
            rows.add(state=gpu_state())
    print(save("gpu_probe", arguments.out, {"dry": arguments.dry, "rows": rows.read()}))


if __name__ == "__main__":
    main()
