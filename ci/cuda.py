"""Run a command on CUDA builds of torch with emulated GPUs: for CUDA tensors on a machine without a GPU. Linux on x86-64, g++.

usage: python ci/cuda.py [OPTION ...] COMMAND ...       set up what is missing, then run the command in the current folder
       python ci/cuda.py pytest tests/gpu               the first word may be a program of the environment
       python ci/cuda.py --smoke                        what every change has to pass, in three minutes
       python ci/cuda.py --steps [--record] [NAME ...]  everything on CUDA tensors, or some of it (ci/cuda_steps.py); --record writes
                                                        the table of docs/development/gpu-runs.md
       python ci/cuda.py --set-up                       only set up

It uses the package sources of pip's configuration. It keeps the environment in --folder, 7 GB for each torch outside
the project, and reuses it.

**It is not a GPU.** The emulated CUDA runtime keeps device memory in host memory. torch's CPU kernels run late, in the
order of the streams. torch's CUDA build, its allocator, streams, events, IPC and ProcessGroupNCCL are real. The driver,
NVML, NCCL and the kernels are not. A failure may be caused by the emulation. A success says nothing about a GPU's
speed, the order in which its kernels add numbers, or the real NCCL.

Exit code: that of the command; 2 for a wrong option, 77 if this machine cannot run it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO

import cuda_steps
from common import NOT_RUN, ROOT
from cuda_setup import CELLS, SOURCES, Rig

# Value (N: a required number) and meaning of each fault.
FAULTS = {
    "no_driver": ("", "no driver: cudaErrorInsufficientDriver, and NVML does not start"),
    "old_driver": ("", "the driver is older than CUDA: cudaErrorInsufficientDriver"),
    "no_device": ("", "a driver, and no GPU"),
    "not_initialized": ("", "802: the system is not ready (NVSwitch's fabric manager)"),
    "driver_mismatch": ("", "803: driver and CUDA's driver library do not belong together; NVML does not start"),
    "no_forward_compatibility": ("", "804: a compatibility library on a GPU that does not allow it"),
    "device_lost": ("N", "the GPU is lost after the N-th call of a process that launches work; 0: from the start"),
    "out_of_memory": ("N", "the N-th allocation of device memory fails"),
    "exclusive": ("", "compute mode EXCLUSIVE_PROCESS, without MPS"),
    "prohibited": ("", "compute mode PROHIBITED"),
    "mps_clients": ("N", "MPS, which has no room for more than N processes"),
    "no_ipc": ("", "IPC handles are refused, as on MIG or WSL"),
    "no_ipc_import": ("", "IPC handles cannot be opened, as in another container"),
    "no_stream_words": ("", "streams cannot write words nor wait for them"),
    "no_pinned_memory": ("", "pinned host memory is refused"),
    "no_nvml": ("", "NVML's library is missing"),
    "nccl_init_hang": ("", "ncclCommInitRank never returns"),
    "nccl_hang": ("N", "the N-th collective never ends"),
    "nccl_abort_hang": ("", "ncclCommAbort never returns"),
    "nccl_late_error": ("N", "the N-th collective fails after it was started"),
    "nccl_refuse": ("N", "rank N fails to make its communicator"),
    "nccl_oom": ("N", "rank N has no memory for its communicator"),
    "nccl_duplicate": ("", "NCCL takes all ranks of a host to be on one device"),
}
_MAX_DEVICES, _MAX_SLICES = 16, 7
_GRACE_SECONDS = 5
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def nvml_functions() -> list[str]:
    """Return the functions that nvml_FUNCTION can name, without the prefix nvml and without a version."""
    defined = re.findall(r"nvmlReturn_t nvml([A-Z]\w*?)(?:_v\d)?\(", (SOURCES / "nvml.cpp").read_text())
    return sorted(set(defined) - {"InitWithFlags"})


def fault(text: str) -> str:
    """Check one NAME or NAME=VALUE."""
    name, equals, value = text.partition("=")
    if name.startswith("nvml_"):
        known, kind = name.removeprefix("nvml_") in nvml_functions(), ""
        names = ["nvml_" + function for function in nvml_functions()]
    else:
        known, kind = name in FAULTS, FAULTS.get(name, ("",))[0]
        names = [*FAULTS, "nvml_FUNCTION"]
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such fault; use one of {', '.join(names)}")
    if kind and not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: this fault needs a number, such as {name}=1")
    if not kind and equals:
        raise argparse.ArgumentTypeError(f"{text!r}: this fault has no value; use {name}")
    return text


def number(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a check for an integer between two bounds."""

    def check(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer from {lowest} to {highest}; use one of these")
        return int(text)

    return check


def nccl_version(text: str) -> str:
    """Check a version of NCCL."""
    if not re.fullmatch(r"2\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version of NCCL; use one such as 2.28.9")
    return text


def parse() -> argparse.Namespace:
    """Return the options; exit with 2 for a wrong option."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    faults = [(f"{name}=N" if kind else name, meaning) for name, (kind, meaning) in FAULTS.items()]
    faults.append(("nvml_FUNCTION", "this function of NVML fails with NVML_ERROR_UNKNOWN; such as nvml_DeviceGetUUID"))
    parser = argparse.ArgumentParser(
        prog="ci/cuda.py",
        description=__doc__,
        epilog="faults:\n" + "\n".join(f"  {name:26}{meaning}" for name, meaning in faults),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--torch", choices=CELLS, default=next(iter(CELLS)), help="with its CUDA and a Ray; default: %(default)s")
    add("--folder", type=Path, default=cache / "ray_fracbackend-cuda", help="default: %(default)s")
    add("--libraries", action="store_true", help="also install Lightning, Accelerate and Transformers")
    add("--set-up", action="store_true", help="set up, print time and disk, and end")
    add("--smoke", action="store_true", help="run what every change has to pass")
    add("--steps", action="store_true", help="run the steps that are named behind the options, or all")
    add("--record", action="store_true", help="write what the steps came to, and their table")
    add("--devices", type=number(1, _MAX_DEVICES), default=1, metavar="N", help="GPUs; default: 1")
    add("--mig", type=number(0, _MAX_SLICES), default=0, metavar="N", help="MIG slices on each GPU; default: no MIG")
    add("--memory-mib", type=number(64, 1 << 20), default=8192, metavar="N", help="of each GPU; default: %(default)s")
    add("--nccl", type=nccl_version, metavar="VERSION", help="the emulated NCCL; default: that of this torch")
    add("--fault", type=fault, action="append", default=[], metavar="NAME[=N]", help="see below; repeatable")
    like = "also as late and as lax as hardware: time slices, shared queues, implicit waits, memory of contexts"
    add("--like", choices=["gpu"], default="", help=like)
    add("--seed", type=number(0, (1 << 31) - 1), default=0, metavar="N", help="of the delays; default: %(default)s")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="with its own options")
    options = parser.parse_args()
    options.command = options.command[options.command[:1] == ["--"] :]
    if options.devices * max(options.mig, 1) > _MAX_DEVICES:
        parser.error(
            f"--devices {options.devices} with --mig {options.mig}: the rig has at most {_MAX_DEVICES} slices in all; "
            "use fewer GPUs or slices"
        )
    if unknown := [name for name in options.command if options.steps and name not in cuda_steps.STEPS]:
        parser.error(f"there is no step {unknown[0]!r}; use one of {', '.join(map(repr, cuda_steps.STEPS))}")
    if options.smoke and options.command:
        parser.error(f"--smoke takes no command: leave out {' '.join(options.command)!r}")
    if not (options.command or options.set_up or options.smoke or options.steps):
        parser.error("no command: add one, such as `pytest tests/gpu`, or --smoke, --steps, --set-up")
    return options


def environment(rig: Rig, options: argparse.Namespace, state: Path) -> dict[str, str]:
    """Return the command's environment variables."""
    is_nvml_there = "no_nvml" not in options.fault
    outer = os.environ
    before = {
        "PATH": [rig.venv / "bin"],
        "PYTHONPATH": [SOURCES / "site", ROOT],
        "LD_PRELOAD": [rig.lib / rig.cell.runtime, rig.lib / "libnccl.so.2"],
        "LD_LIBRARY_PATH": [rig.lib, *([rig.lib / "nvml"] if is_nvml_there else [])],
    }
    settings = {
        "STATE": state,
        "DEVICES": options.devices,
        "MIG": options.mig,
        "MEMORY_MIB": options.memory_mib,
        "NCCL": options.nccl or rig.cell.nccl,
        "FAULT": ",".join(options.fault),
        "SEED": options.seed,
        "LIKE": options.like,
    }
    return {
        **outer,
        **{name: ":".join([*map(str, paths), *filter(None, [outer.get(name)])]) for name, paths in before.items()},
        **{f"CUDA_RIG_{name}": str(value) for name, value in settings.items()},
        "VIRTUAL_ENV": str(rig.venv),
    }


class Command:
    """Run one command: pass signals on to it, and end the processes that it leaves.

    Attributes:
        signal: The last signal that was passed on; 0 for none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._forward)
        # Child processes whose parent has ended become children of this process, so none is missed.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(
        self, command: list[str], variables: dict[str, str], output: IO[str] | None = None, limit_s: float = 0
    ) -> int:
        """Run the command to its end; return its exit code, 128 + N for signal N.

        Args:
            command: Program and arguments.
            variables: Environment of the command.
            output: File for its output; None for the output of this process.
            limit_s: Seconds until it gets SIGTERM; 0 for no limit.
        """
        try:
            process = self._process = subprocess.Popen(
                command, env=variables, start_new_session=True, stdout=output, stderr=output
            )
        except OSError as error:
            raise SystemExit(f"ci/cuda.py: cannot start {command[0]}: {error.strerror}") from None
        timer = threading.Timer(limit_s, self._end_late, (limit_s,))
        if limit_s:
            timer.start()
        try:
            while True:
                pid, status = os.waitpid(-1, 0)  # also for other children, which only this process can wait for
                if pid == process.pid:
                    code = process.returncode = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
        finally:
            timer.cancel()
            self._end_others()

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        if self._process is None:
            raise SystemExit(128 + number)
        self._send(number)

    def _end_late(self, limit_s: float) -> None:
        print(f"ci/cuda.py: still running after {limit_s:g} s: ending it", file=sys.stderr)
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        assert self._process is not None
        if self._process.returncode is not None:  # its process id may have been reused
            return
        send = os.killpg if number == signal.SIGINT else os.kill  # like a terminal
        with contextlib.suppress(ProcessLookupError):
            send(self._process.pid, number)

    def _end_others(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        killed: dict[int, str] = {}
        while left := _descendants():
            if time.monotonic() > deadline:
                killed.update(left)
                for pid in left:
                    _kill(pid)
            time.sleep(0.05)
            while _reap():
                pass
        if killed:
            names = ", ".join(f"{name} ({pid})" for pid, name in killed.items())
            print(
                f"ci/cuda.py: killed {len(killed)} process{'es' * (len(killed) != 1)} that the command left: {names}",
                file=sys.stderr,
            )


def _descendants() -> dict[int, str]:
    """Return process ids and names of all living descendants of this process."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = path.read_text(errors="replace").partition(" (")
        except OSError:  # has ended
            continue
        name, _, fields = rest.rpartition(") ")
        state, parent = fields.split()[:2]
        if state not in "ZX":
            parents[int(pid)], names[int(pid)] = int(parent), name
    found: dict[int, str] = {}
    new = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in new and pid not in found}:
        found.update({pid: names[pid] for pid in new})
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def main() -> None:
    options = parse()
    rig = Rig(options.folder.absolute() / f"torch-{options.torch}", options.torch)
    if reason := rig.why_not():
        print(f"ci/cuda.py: not run: {reason}", file=sys.stderr)
        raise SystemExit(NOT_RUN)
    rig.set_up(libraries=options.libraries, always_say=options.set_up)
    if options.set_up:
        return
    command = Command()
    if options.steps:
        raise SystemExit(run_steps(command, rig, options))
    words = list(cuda_steps.SMOKE.command) if options.smoke else options.command
    with state_folder() as state:
        limit_s = cuda_steps.SMOKE.limit_s if options.smoke else 0
        code = command.run(words, environment(rig, options, state), limit_s=limit_s)
    raise SystemExit(code)


@contextlib.contextmanager
def state_folder() -> Iterator[Path]:
    """Create the folder that the processes of one command share."""
    state = Path(tempfile.mkdtemp(prefix="cuda-rig-"))
    try:
        yield state
    finally:
        shutil.rmtree(state, ignore_errors=True)


def run_steps(command: Command, rig: Rig, options: argparse.Namespace) -> int:
    """Run steps one after the other, each on its own machine; return 1 if one failed, 128 + N after signal N."""
    failed = False
    (rig.folder / "steps").mkdir(exist_ok=True)
    for name in options.command or cuda_steps.STEPS:
        step = cuda_steps.STEPS[name]
        log = rig.folder / "steps" / f"{name.replace(' ', '_')}.log"
        with state_folder() as state:
            found = cuda_steps.run(command.run, step, environment(rig, options, state), log)
        if command.signal:
            print(f"{name}: stopped by signal {command.signal}; {log}", flush=True)
            return 128 + command.signal
        failed |= found["result"] != "passed"
        counts = ", ".join(f"{number} {word}" for word, number in found["counts"].items())
        print(f"{name}: {found['result']} in {found['seconds']} s ({counts}); {log}", flush=True)
        if options.record:
            cuda_steps.record(options.torch, rig.cell.ray, {name: found})
    return int(failed)


if __name__ == "__main__":
    main()
