"""Run the ranks of a GPU benchmark as killable processes, with a time limit per case and optionally MPS.

A benchmark script starts itself as its ranks: `run_case` runs in the parent, `in_rank` and `Rank` in the children. Each
row is written as soon as it is measured. A case that fails or hangs becomes a row with its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Rows, add_row
from torch.distributed import TCPStore

from ray_fracbackend.decide.error_texts import refusal_in
from ray_fracbackend.decide.nccl import multi_rank_env
from ray_fracbackend.decide.worker_info import version_text
from ray_fracbackend.worker.group_end import destroy_process_groups
from ray_fracbackend.worker.nccl_library import loaded_nccl_version

Row = dict[str, Any]
_SPEC = "GPU_BENCHMARK_SPEC"
_MPS_S = 15.0
# A rank that outlives the first failure waits for a lost peer.
_GRACE_S = 5.0
_COLLECTIVE = timedelta(seconds=120)


def add_options(parser: ArgumentParser, budget_s: float) -> None:
    """Add the options that all GPU benchmarks have."""
    parser.add_argument("--dry", action="store_true", help="the same on CPUs with tiny sizes: a check of the script")
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="seconds for everything; what is left is skipped"
    )
    parser.add_argument("--nccl-library", help="a libnccl.so.2 to load before torch's own, for the backend nccl alone")
    parser.add_argument("--case-s", type=float, default=60.0, help="bound on the processes of one case")
    parser.add_argument("--mps", action="store_true", help="all cases as clients of an MPS daemon")


# Additions of a case to the backend of its group. For ipc device memory is required: otherwise its row would show
# staged.
_IN_MEMORY = {"RAY_FRACBACKEND_IPC_DEVICE_PATH": "memory"}
_BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "copy": ("gloo", {}),
    "none": ("gloo", {}),
    "ipc": ("ipc", _IN_MEMORY),
    "ipc_one_pass": ("ipc", {**_IN_MEMORY, "RAY_FRACBACKEND_IPC_DEVICE_ONE_PASS_BYTES": str(1 << 40)}),
    "ipc_4_mib": ("ipc", {**_IN_MEMORY, "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES": str(4 << 20)}),
    "staged_gloo": ("staged", {"RAY_FRACBACKEND_STAGED_INNER": "gloo"}),
    "nccl_hostid": ("nccl", {}),
}


def env_of(spec: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables of one rank: those of `_BACKENDS`, NCCL's multi-rank flags and library, and a host id."""
    # torch 2.15 makes an NCCL group on the device with this number.
    env = {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0", **_BACKENDS.get(spec["backend"], ("", {}))[1]}
    if spec["backend"] == "nccl":
        preload = {"LD_PRELOAD": spec["nccl_library"]} if spec["nccl_library"] else {}
        return {**env, **multi_rank_env(spec["num_ranks"]), **preload}
    return {**env, "NCCL_HOSTID": f"rank{rank}"} if spec["backend"] == "nccl_hostid" else env


class Cases:
    """Run the cases of one benchmark within its budget.

    Args:
        script: The benchmark's own file.
        options: Command line with ``dry``, ``budget_s``, ``case_s``, ``nccl_library`` and ``mps``.
    """

    def __init__(self, script: str, options: Any) -> None:
        self._script, self._options = script, options
        self._end = time.monotonic() + options.budget_s
        self._refused: dict[str, str] = {}
        self._mps_env: dict[str, str] | str = {}
        self._rows = Rows(Path(script).stem)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run an MPS daemon in the block, if requested, and be its client."""
        with mps() if self._options.mps else contextlib.nullcontext({}) as self._mps_env:
            yield

    def run(self, backend: str, num_ranks: int, **spec: Any) -> None:
        """Run one case; if NCCL refused it with fewer ranks, skip it."""
        case = {"backend": backend, "num_ranks": num_ranks, "mps": self._options.mps}
        left_s = self._end - time.monotonic()
        reason = self._refused.get(backend)
        if isinstance(self._mps_env, str):
            reason = self._mps_env
        elif reason is None and left_s < 1:
            reason = "not run: the budget of the benchmark is spent"
        elif reason is None:
            spec = {**spec, **case, "dry": self._options.dry, "nccl_library": self._options.nccl_library}
            reason = run_case(self._script, spec, min(self._options.case_s, left_s), self._mps_env)
            if reason and refusal_in(reason):
                self._refused[backend] = reason
        if reason:
            self._rows.add(**case, failed=reason)

    def results(self) -> dict[str, Any]:
        """Return all rows so far, for the benchmark's JSON."""
        return {"dry": self._options.dry, "mps": self._options.mps, "rows": self._rows.read()}


def run_case(script: str, spec: dict[str, Any], timeout_s: float, env: dict[str, str]) -> str | None:
    """Start the ranks of one case, wait for them, and end the rest.

    Returns:
        Why rows are missing, None if there was no failure.
    """
    num_ranks = spec["num_ranks"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        logs = [Path(folder, f"rank{rank}.txt") for rank in range(num_ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                told = {**spec, "rank": rank, "port": store.port, "folder": folder}
                rank_env = {**os.environ, **env, **env_of(spec, rank), _SPEC: json.dumps(told)}
                with log.open("w") as file:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, script],
                            env=rank_env,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            waiting, failed = _wait(processes, timeout_s)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if failed is not None:
            return f"rank {failed}: {_reason([logs[failed], *logs])}"
        return f"ranks {waiting} did not end within {timeout_s:.0f} s and were killed" if waiting else None


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> tuple[list[int], int | None]:
    """Wait for all ranks, or for a while after one failed; return the running ranks and the first that failed."""
    end = time.monotonic() + timeout_s
    failed: int | None = None
    while True:
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            end = min(end, time.monotonic() + _GRACE_S)
        waiting = [rank for rank, code in enumerate(codes) if code is None]
        if not waiting or time.monotonic() >= end:
            return waiting, failed
        time.sleep(0.05)


def _reason(logs: list[Path]) -> str:
    texts = [log.read_text(errors="replace") for log in logs]
    refused = next((found for text in texts if (found := refusal_in(text))), None)
    lines = [line.strip() for line in texts[0].splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return refused or (errors or lines or ["ended without a word"])[-1][:500]


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str] | str]:
    """Start a CUDA MPS daemon; yield the variables for its client processes, or why there is none."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield "nvidia-cuda-mps-control is not installed"
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            Path(path).mkdir()

        def control(*arguments: str, text: str = "") -> str | None:
            command = [program, *arguments]
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **env},
                    input=text,
                    text=True,
                    capture_output=True,
                    timeout=_MPS_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"{' '.join(command)} did not answer within {_MPS_S:g} s"
            return (done.stderr or done.stdout).strip() or f"exit code {done.returncode}" if done.returncode else None

        failed = control("-d")
        try:
            yield failed or env
        finally:
            if failed is None:
                control(text="quit\n")


class Rank:
    """This process as a rank of a case.

    Attributes:
        spec: Job of the parent process.
        rank: Number of the rank.
        num_ranks: Number of ranks.
        device: Device of its tensors.
        control: A separate Gloo group for barriers and agreement on the host, which is not measured.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.rank, self.num_ranks = spec, spec["rank"], spec["num_ranks"]
        self.device = torch.device("cpu" if spec["dry"] else "cuda:0")
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=_COLLECTIVE)
        backend = _BACKENDS.get(spec["backend"], (spec["backend"], {}))[0]
        if backend in ("ipc", "staged"):
            import ray_fracbackend.staged  # noqa: F401  registers both backends
        dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.num_ranks, timeout=_COLLECTIVE
        )
        self.control = dist.new_group(backend="gloo", timeout=_COLLECTIVE)

    def tell(self, row: Row) -> None:
        """Write a row from rank 0 at once, so that later failures do not lose it."""
        if self.rank == 0:
            case = {key: self.spec[key] for key in ("backend", "num_ranks", "mps")}
            knobs = {name: value for name, value in os.environ.items() if name.startswith("RAY_FRACBACKEND_")}
            add_row(Path(sys.argv[0]).stem, {**case, **row, **({"knobs": knobs} if knobs else {}), **self._nccl})

    @property
    def _nccl(self) -> Row:
        """Return the loaded library if the case uses NCCL."""
        if "nccl" not in self.spec["backend"]:
            return {}
        return {"nccl": version_text(loaded_nccl_version())}

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks."""
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return value.item()

    def once(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call from a barrier until the device work of the slowest rank is done."""
        self.synchronize()
        dist.barrier(self.control)
        started = time.perf_counter()
        call()
        self.synchronize()
        return self.slowest(time.perf_counter() - started)

    def time_calls(self, call: Callable[[], Any], budget_s: float, most: int = 200) -> list[float]:
        """Return the seconds of each of several calls after a warm-up: at least two, as many as the budget allows."""
        self.once(call)
        again = self.once(call)
        return [self.once(call) for _ in range(max(2, min(most, int(budget_s / again))))]


def in_rank(body: Callable[[Rank], None]) -> bool:
    """Run the body if this process is a rank; return False in the parent."""
    if _SPEC not in os.environ:
        return False
    rank = Rank(json.loads(os.environ[_SPEC]))
    body(rank)
    dist.barrier(rank.control)
    del rank.control
    destroy_process_groups()
    return True
