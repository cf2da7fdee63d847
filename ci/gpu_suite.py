"""Runs the GPU tests and benchmarks, one call of four at a time; called by ci/gpu.sh. Standard library only.

A call writes to its folder while it runs: ``rows.jsonl`` (each measured row, each test, start and end of each step) and
``logs_CALL.tar`` (complete logs). At its end it writes ``gpu_CALL_DATE.json`` and ``.txt``. A step that fails stops no other step and
loses no rows of another. Calls may be repeated and mixed: each adds to the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT

CALLS = ("A", "B", "C", "D")
# Time limit of a whole call in seconds.
CALL_S = 470.0
# A dry run has no limited device time and may run on a busy machine, so its time limits are longer by this factor.
_DRY_SCALE = 4.0
_SLACK_S = 10.0
# Time for a step to end after SIGINT, and for the device to release its memory; what may be missing of the memory.
_GRACE_S, _MEMORY_S, _MEMORY_MIB = 15.0, 20.0, 512
# Environment variable of all processes of a step.
_MARK = "GPU_SUITE_STEP"
# Folder for the unpacked bundle: a machine that stays warm between calls can reuse it.
_UNPACKED = ROOT / ".gpu-bundle-unpacked"
_NEEDS_RAY = ("C", "D")

# Import the host's packages as the package itself does, so that a missing one is named before anything runs.
_CHECK = """
import importlib, json, platform, sys
found, missing = {"python": platform.python_version()}, {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        found[name] = str(getattr(module, "__version__", "present"))
    except Exception as error:
        missing[name] = f"{type(error).__name__}: {error}"
if "torch" in found:
    import torch
    found["cuda"] = torch.version.cuda
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if "ray_fracbackend.ipc" in found:
    from ray_fracbackend.decide.worker_info import version_text
    from ray_fracbackend.worker.nccl_library import loaded_nccl_version
    found["nccl"] = version_text(loaded_nccl_version())
print(json.dumps({"found": found, "missing": missing}))
sys.exit(bool(missing))
"""
_MODULES = ("torch", "numpy", "pytest", "packaging", "psutil", "pynvml", "ray_fracbackend.ipc")
_RAY_MODULES = ("pandas", "pyarrow", "ray", "ray.train.torch", "ray.tune", "ray_fracbackend.config")


@dataclass
class Step:
    """One command of the suite.

    Args:
        name: Short name, unique in a call.
        command: Program and arguments, run in the project's folder.
        limit_s: Time limit in seconds.
        env: Environment variables besides those of the suite.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)


class Call:
    """One call of the suite.

    Args:
        name: One of `CALLS`.
        options: Command line with ``bundle``, ``out``, ``dry`` and ``scale``.
        work: Folder for files that are not returned.
    """

    def __init__(self, name: str, options: argparse.Namespace, work: Path) -> None:
        self._name, self._options, self._work = name, options, work
        self._scale = options.scale * (_DRY_SCALE if options.dry else 1.0)
        self._env = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        self._library: Path | None = None
        options.out.mkdir(parents=True, exist_ok=True)
        self._rows, self._logs = options.out / "rows.jsonl", options.out / f"logs_{name}.tar"
        self._logs.unlink(missing_ok=True)

    def run(self) -> dict[str, Any]:
        """Run the steps; return the report as plain values."""
        begin, started = self._position(), time.monotonic()
        end = started + CALL_S * self._scale
        steps = [self._run_step(step, end - time.monotonic()) for step in self._steps()]
        return {
            "suite": f"gpu_{self._name}",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "dry": self._options.dry,
            "ok": all(step["status"] == "passed" for step in steps),
            "seconds": round(time.monotonic() - started, 1),
            "steps": steps,
            "rows": [row for row in self._rows_since(begin) if "event" not in row and "test" not in row],
        }

    def _run_step(self, step: Step, left_s: float) -> dict[str, Any]:
        """Run one step; its output goes to a file, so that no process of it can keep a pipe open."""
        limit_s = max(1.0, min(step.limit_s, left_s))
        log, mark, used = self._options.out / f"{self._name}_{step.name}.log", uuid.uuid4().hex, memory_used_mib()
        print(f"--- {step.name}, at most {limit_s:.0f} s", flush=True)
        self._add(step=step.name, event="begins", limit_s=round(limit_s, 1))
        begin, started = self._position(), time.monotonic()
        own = {"BENCHMARK_ROWS": str(self._rows), "GPU_SUITE_NAME": step.name, _MARK: mark}
        with log.open("w") as file:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**os.environ, **step.env, **own},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timed_out = _wait(process, limit_s)
        _kill_all(mark)
        found = {
            "command": list(step.command),
            "limit_s": limit_s,
            "status": "timed out" if timed_out else "failed" if process.returncode else "passed",
            "exit_code": process.returncode,
            "seconds": round(time.monotonic() - started, 1),
            **_results(self._rows_since(begin)),
            "output_tail": log.read_text(errors="replace")[-4000:],
            "memory_left_mib": _memory_left_mib(used),
        }
        self._add(step=step.name, event="ended", **found)
        # Some machines return only few files.
        with tarfile.open(self._logs, "a") as tar:
            tar.add(log, log.name)
        log.unlink()
        print(f"--- {step.name}: {found['status']} after {found['seconds']:.0f} s {found['counts'] or ''}", flush=True)
        return {"name": step.name, **found}

    def _add(self, **row: Any) -> None:
        """Append a row, on a new line even after an unfinished row of a process."""
        is_cut = self._rows.exists() and not self._rows.read_bytes().endswith(b"\n")
        with self._rows.open("a") as file:
            file.write(("\n" if is_cut else "") + json.dumps({"call": self._name, **row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _position(self) -> int:
        return self._rows.stat().st_size if self._rows.exists() else 0

    def _rows_since(self, position: int) -> list[dict[str, Any]]:
        """Read the rows from a position, without unfinished ones."""
        rows: list[dict[str, Any]] = []
        with self._rows.open() as file:
            file.seek(position)
            for line in file:
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        return rows

    def _steps(self) -> Iterator[Step]:
        yield from self._prepare()
        yield from {"A": self._first, "B": self._backends, "C": self._ray, "D": self._mps_and_nccl}[self._name]()

    def _step(self, name: str, command: list[str], limit_s: float, env: dict[str, str] | None = None) -> Step:
        return Step(name, [sys.executable, *command], limit_s * self._scale, {**self._env, **(env or {})})

    def _prepare(self) -> Iterator[Step]:
        """Unpack the bundle, and check that everything can be imported."""
        path = [str(ROOT)]
        if self._name in _NEEDS_RAY and self._options.bundle.is_dir():
            yield self._step("unpack", ["ci/gpu_unpack.py", str(self._options.bundle), str(_UNPACKED)], 120)
            path.append(str(_UNPACKED / "site"))
            library = _UNPACKED / "libnccl.so.2"
            self._library = library if library.is_file() else None
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self._env["PYTHONPATH"] = os.pathsep.join(path)
        modules = [*_MODULES, *(_RAY_MODULES if self._name in _NEEDS_RAY else ())]
        yield self._step("imports", ["-c", _CHECK, *modules], 60)

    def _first(self) -> Iterator[Step]:
        """Return the steps that decide whether and where ipc is useful."""
        yield self._benchmark("gpu_probe", 60)
        right = "random_numbers or streams_order or ddp_trains"
        yield self._pytest("right", ["tests/gpu/test_gpu_ipc.py", "-k", right], 90)
        backends = ["copy", "ipc", "gloo", "staged", "ipc_one_pass", "ipc_4_mib"]
        yield self._benchmark("gpu_all_reduce", 130, "--backends", *backends)
        more = ["--backends", "ipc", "gloo", "--ranks", "2", "--sizes", "65536", "26214400"]
        yield self._benchmark("gpu_all_reduce", 25, *more, "--dtype", "bfloat16", name="gpu_all_reduce_bf16")
        operations = ["--operations", "all_gather", "reduce_scatter", "--backends", "ipc", "staged"]
        sizes = ["--ranks", "2", "--sizes", "65536", "26214400"]
        yield self._benchmark("gpu_all_reduce", 20, *operations, *sizes, name="gpu_all_gather")
        yield self._benchmark("gpu_ddp", 80, "--backends", "none", "ipc", "gloo", "staged")

    def _backends(self) -> Iterator[Step]:
        """Return the steps that measure device memory, so they run alone on the device."""
        yield self._pytest("tests_ipc", ["tests/gpu/test_gpu_ipc.py"], 300)
        yield self._pytest("tests_staged", ["tests/gpu/test_gpu_staged.py", "tests/gpu/test_gpu_verify.py"], 150)

    def _ray(self) -> Iterator[Step]:
        """Return the steps with Ray: V2 first, in the order of the tests."""
        yield self._pytest("tests_ray", [*_WITH_RAY, "-k", "not nccl"], 400)

    def _mps_and_nccl(self) -> Iterator[Step]:
        """Return the steps that need features that not every host has."""
        yield self._benchmark("gpu_handoff", 40)
        yield self._benchmark("gpu_handoff", 40, "--mps", name="gpu_handoff_mps")
        yield self._benchmark("gpu_all_reduce", 90, "--mps", "--ranks", "2", "4", name="gpu_all_reduce_mps")
        yield self._benchmark("gpu_all_reduce", 40, "--backends", "nccl", "nccl_hostid", name="gpu_all_reduce_nccl")
        yield self._benchmark("gpu_ddp", 60, "--mps", "--backends", "none", "ipc", "gloo", "nccl", name="gpu_ddp_mps")
        yield self._pytest("tests_nccl", [*_WITH_RAY, "-k", "nccl or stock"], 200, self._preload())

    def _preload(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library)} if self._library else {}

    def _pytest(self, name: str, arguments: list[str], limit_s: float, env: dict[str, str] | None = None) -> Step:
        command = ["-m", "pytest", "-c", "ci/gpu-pytest.ini", "--rootdir", ".", "-v", *arguments]
        return self._step(name, [*command, *(["--collect-only"] if self._options.dry else [])], limit_s, env)

    def _benchmark(self, script: str, budget_s: float, *arguments: str, name: str = "") -> Step:
        command = [
            f"benchmarks/{script}.py",
            "--out",
            str(self._work / (name or script)),
            "--budget-s",
            f"{budget_s * self._scale:g}",
        ]
        command += ["--dry"] if self._options.dry else []
        command += ["--nccl-library", str(self._library)] if self._library and script != "gpu_probe" else []
        # Files that a killed step leaves are deleted with the call's folder.
        env = {"TMPDIR": str(self._work)}
        return self._step(name or script, [*command, *arguments], budget_s + _SLACK_S, env)


_WITH_RAY = ["tests/gpu/test_gpu_training.py", "tests/gpu/test_gpu_bench.py"]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a step; after its time limit end it by SIGINT first, so it can still report its results."""
    try:
        process.wait(timeout=limit_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def _kill_all(mark: str) -> None:
    """Kill every process that a step has left, in any session: it would keep its device memory."""
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (found / "environ").read_bytes().split(b"\0"):
                os.kill(int(found.name), signal.SIGKILL)


def memory_used_mib() -> int | None:
    """Return the memory in use on all devices by all processes; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(map(int, done.stdout.split()))
    return None


def _memory_left_mib(before: int | None) -> int | None:
    """Wait until the device has released the memory of a step; return what is missing, None if it is little."""
    end = time.monotonic() + _MEMORY_S
    while before is not None and (now := memory_used_mib()) is not None and now - before > _MEMORY_MIB:
        if time.monotonic() > end:
            return now - before
        time.sleep(0.5)
    return None


def _results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the rows and tests of a step; tests/gpu/conftest.py writes a row per test, because a crash would lose a report.

    Returns:
        ``counts`` (tests by outcome and the number collected, or rows, and rows without a result), and the tests in
        ``failures`` and ``skips`` with their texts.
    """
    counts: dict[str, int] = {}
    tests: dict[str, list[dict[str, str]]] = {"failed": [], "skipped": [], "passed": []}
    for row in rows:
        if "num_collected" in row:
            counts["collected"] = row["num_collected"]
        elif "script" in row:
            kind = row["outcome"] if "test" in row else "failed rows" if "failed" in row else "rows"
            counts[kind] = counts.get(kind, 0) + 1
            if "test" in row:
                tests[kind].append({"test": row["test"], "text": row["text"]})
    return {"counts": counts, "failures": tests["failed"], "skips": tests["skipped"]}


def text_of(report: dict[str, Any]) -> str:
    """Return the report as text: steps, failures and skips, and one line for each measured row."""
    dry = ", dry: no GPU was used" if report["dry"] else ""
    lines = [f"{report['suite']} {report['date']}: {'all passed' if report['ok'] else 'FAILED'}{dry}", ""]
    for step in report["steps"]:
        counts = ", ".join(f"{count} {what}" for what, count in step["counts"].items())
        lines.append(f"{step['name']:<20}{step['status']:<10}{step['seconds']:>7.1f} s  {counts}".rstrip())
        if step["memory_left_mib"]:
            lines.append(f"{'':<20}left {step['memory_left_mib']} MiB of the device in use")
    for step in report["steps"]:
        lines += [f"\nFAILED {bad['test']}\n{bad['text']}" for bad in step["failures"]]
        lines += [f"skipped {skip['test']}: {skip['text']}" for skip in step["skips"]]
        if step["status"] != "passed" and not step["failures"]:
            lines.append(f"\n{step['name']} {step['status']}, its last output:\n{step['output_tail']}")
    lines += ["", *(json.dumps(row) for row in report["rows"])]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="ci/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=(*CALLS, "all"))
    parser.add_argument("--bundle", type=Path, default=ROOT / ".gpu-bundle", help="folder made by ci/gpu_bundle.sh")
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--out", type=Path, default=out, help=f"folder for what is found (default: {out})")
    parser.add_argument("--dry", action="store_true", help="all that a machine without a GPU can do")
    parser.add_argument("--scale", type=float, default=1.0, help="all times so many times as long, as on emulated GPUs")
    return parser.parse_args()


def main() -> None:
    options = parse()
    ok = True
    for name in CALLS if options.call == "all" else (options.call,):
        with tempfile.TemporaryDirectory(prefix="gpu-suite-", ignore_cleanup_errors=True) as work:
            report = Call(name, options, Path(work)).run()
        ok = ok and report["ok"]
        stem = f"gpu_{name}{'_dry' if options.dry else ''}_{report['date'][:10]}"
        (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / f"{stem}.txt").write_text(text_of(report))
        print(text_of(report))
        print(f"written to {options.out / stem}.json and .txt", flush=True)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
