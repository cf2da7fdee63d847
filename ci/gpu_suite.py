"""Runs the GPU tests and benchmarks in the order of their value; called by ci/gpu.sh. Standard library only.

It writes to its folder while it runs: ``rows.jsonl`` (each measured row, each test, start and end of each step) and ``logs.tar`` (complete
logs). At its end it writes ``gpu_DATE.json`` and ``.txt``, which begins with a summary. A step that fails stops no other step and loses no
rows of another. A step that finds no time left is not run. Calls may be repeated: each adds to the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
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
from gpu_summary import summary

# A dry run has no limited device time and may run on a busy machine, so its time limits are longer by this factor.
_DRY_SCALE = 4.0
# Below this a step is not begun.
_LEAST_S = 5.0
_SLACK_S = 10.0
# Time for a step to end after SIGINT, and for the device to release its memory; what may be missing of the memory.
_GRACE_S, _MEMORY_S, _MEMORY_MIB = 15.0, 20.0, 512
# Environment variable of all processes of a step.
_MARK = "GPU_SUITE_STEP"
# Folder for the unpacked bundle: a machine that stays warm between calls can reuse it.
_UNPACKED = ROOT / ".gpu-bundle-unpacked"
_TRAINING = "tests/gpu/test_gpu_training.py"
_SAME = f"{_TRAINING}::test_same_losses"
_IPC, _STAGED, _VERIFY = "tests/gpu/test_gpu_ipc.py", "tests/gpu/test_gpu_staged.py", "tests/gpu/test_gpu_verify.py"
# These may leave a device with stuck streams, and are last.
_FAULTS = "struck or faults or survivor or stuck or killed"
_RIGHT = "random_numbers and 2 or long_kernel or ddp"
_REDUCE = ("benchmarks/gpu_all_reduce.py", "--sizes", "65536", "26214400", "1048576")
# By value: seconds, and a benchmark or tests with their arguments.
STEPS: Mapping[str, tuple[float, Sequence[str]]] = {
    "gpu_probe": (40, ["benchmarks/gpu_probe.py", "--questions", "identity", "memory", "event", "semaphore", "copy"]),
    "trains": (110, [f"{_SAME}[ipc-v2-2]", f"{_SAME}[gloo-v2-2]", f"{_TRAINING}::test_stock_fails"]),
    "right": (90, [_IPC, _STAGED, "-k", _RIGHT]),
    "all_reduce": (75, [*_REDUCE, "--ranks", "2", "4", "--backends", "ipc", "gloo", "staged", "copy"]),
    "ddp": (75, ["benchmarks/gpu_ddp.py", "--ranks", "2", "--backends", "none", "ipc", "gloo", "staged"]),
    "handoff": (30, ["benchmarks/gpu_handoff.py", "--ranks", "2", "4"]),
    "all_reduce_mps": (45, [*_REDUCE, "--mps", "--ranks", "2", "--backends", "ipc", "gloo", "staged"]),
    "handoff_mps": (25, ["benchmarks/gpu_handoff.py", "--mps", "--ranks", "2", "4"]),
    "all_reduce_nccl": (25, [*_REDUCE, "--ranks", "2", "--backends", "nccl", "nccl_hostid"]),
    "memory_cap": (75, [_TRAINING, "-k", "capped and v2"]),
    "tests_ipc": (300, [_IPC, "-k", f"not ({_FAULTS})"]),
    "tests_staged": (150, [_STAGED, _VERIFY, "-k", f"not ({_FAULTS})"]),
    "tests_ray": (400, [_TRAINING, "tests/gpu/test_gpu_bench.py", "-k", "not nccl"]),
    "ddp_mps": (75, ["benchmarks/gpu_ddp.py", "--mps", "--backends", "none", "ipc", "gloo", "nccl"]),
    "all_reduce_more": (130, ["benchmarks/gpu_all_reduce.py"]),
    "all_reduce_bf16": (30, [*_REDUCE, "--dtype", "bfloat16", "--ranks", "2", "--backends", "ipc", "gloo"]),
    "all_gather": (
        30,
        [*_REDUCE, "--operations", "all_gather", "reduce_scatter", "--ranks", "2", "--backends", "ipc", "staged"],
    ),
    "tests_nccl": (200, [_TRAINING, "-k", "nccl"]),
    "killed": (25, ["benchmarks/gpu_probe.py", "--questions", "killed"]),
    "faults": (400, [_IPC, _STAGED, "-k", _FAULTS]),
}
# What a first call of nine minutes answers.
FIRST = [*itertools.takewhile(lambda name: name != "tests_ipc", STEPS), "killed"]

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
        name: Short name, unique in a run.
        command: Program and arguments, run in the project's folder.
        limit_s: Time limit in seconds.
        env: Environment variables besides those of the suite.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)


class Suite:
    """One run of the suite.

    Args:
        options: Command line with ``steps``, ``minutes``, ``bundle``, ``out``, ``dry`` and ``scale``.
        work: Folder for files that are not returned.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options, self._work = options, work
        self._scale = options.scale * (_DRY_SCALE if options.dry else 1.0)
        self._env = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        self._library: Path | None = None
        options.out.mkdir(parents=True, exist_ok=True)
        self._rows, self._logs = options.out / "rows.jsonl", options.out / "logs.tar"
        self._logs.unlink(missing_ok=True)

    def run(self) -> dict[str, Any]:
        """Run the steps; return the report as plain values."""
        begin, started = self._position(), time.monotonic()
        end = started + self._options.minutes * 60
        steps = [self._run_step(step, end - time.monotonic()) for step in self._steps()]
        rows = self._rows_since(begin)
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "dry": self._options.dry,
            "ok": all(step["status"] == "passed" for step in steps),
            "seconds": round(time.monotonic() - started, 1),
            "summary": summary(rows),
            "steps": steps,
            "rows": [row for row in rows if "event" not in row and "test" not in row],
        }

    def _run_step(self, step: Step, left_s: float) -> dict[str, Any]:
        """Run one step; its output goes to a file, so that no process of it can keep a pipe open."""
        limit_s = min(step.limit_s, left_s)
        if limit_s < _LEAST_S:
            return {"name": step.name, **_NOT_RUN}
        log, mark, used = self._options.out / f"{step.name}.log", uuid.uuid4().hex, memory_used_mib()
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
            file.write(("\n" if is_cut else "") + json.dumps(row) + "\n")
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
        """Unpack the bundle, check that everything can be imported, then run what was asked for."""
        path = [str(ROOT)]
        if self._options.bundle.is_dir():
            yield self._step("unpack", 60, ["ci/gpu_unpack.py", str(self._options.bundle), str(_UNPACKED)])
            path.append(str(_UNPACKED / "site"))
            library = _UNPACKED / "libnccl.so.2"
            self._library = library if library.is_file() else None
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self._env["PYTHONPATH"] = os.pathsep.join(path)
        yield self._step("imports", 60, ["-c", _CHECK, *_MODULES, *_RAY_MODULES])
        for name in self._options.steps:
            limit_s, words = STEPS[name]
            is_benchmark = words[0].startswith("benchmarks")
            yield (self._benchmark if is_benchmark else self._pytest)(name, limit_s, words)

    def _step(self, name: str, limit_s: float, command: Sequence[str], env: Mapping[str, str] | None = None) -> Step:
        return Step(name, [sys.executable, *command], limit_s * self._scale, {**self._env, **(env or {})})

    def _pytest(self, name: str, limit_s: float, words: Sequence[str]) -> Step:
        command = ["-m", "pytest", "-c", "ci/gpu-pytest.ini", "--rootdir", ".", "-v", *words]
        env = {"LD_PRELOAD": str(self._library)} if self._library and name.endswith("nccl") else {}
        return self._step(name, limit_s, [*command, *(["--collect-only"] if self._options.dry else [])], env)

    def _benchmark(self, name: str, limit_s: float, words: Sequence[str]) -> Step:
        budget_s = (limit_s - _SLACK_S) * self._scale
        command = [*words, "--out", str(self._work / name), "--budget-s", f"{budget_s:g}"]
        command += ["--dry"] if self._options.dry else []
        command += ["--nccl-library", str(self._library)] if self._library and "gpu_probe" not in words[0] else []
        # Files that a killed step leaves are deleted with the folder.
        return self._step(name, limit_s, command, {"TMPDIR": str(self._work)})


_NOT_RUN = {
    "status": "not run",
    "seconds": 0.0,
    "counts": {},
    "failures": [],
    "skips": [],
    "memory_left_mib": None,
    "output_tail": "",
}


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
    """Return the report as text: the summary, steps, failures and skips, and one line for each measured row."""
    dry = ", dry: no GPU was used" if report["dry"] else ""
    result = "all passed" if report["ok"] else "NOT all passed"
    lines = [f"gpu {report['date']}: {result} in {report['seconds']:.0f} s{dry}", "", *report["summary"], ""]
    for step in report["steps"]:
        counts = ", ".join(f"{count} {what}" for what, count in step["counts"].items())
        lines.append(f"{step['name']:<20}{step['status']:<10}{step['seconds']:>7.1f} s  {counts}".rstrip())
        if step["memory_left_mib"]:
            lines.append(f"{'':<20}left {step['memory_left_mib']} MiB of the device in use")
    for step in report["steps"]:
        lines += [f"\nFAILED {bad['test']}\n{bad['text']}" for bad in step["failures"]]
        lines += [f"skipped {skip['test']}: {skip['text']}" for skip in step["skips"]]
        if step["status"] not in ("passed", "not run") and not step["failures"]:
            lines.append(f"\n{step['name']} {step['status']}, its last output:\n{step['output_tail']}")
    lines += ["", *(json.dumps(row) for row in report["rows"])]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="ci/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"all, or some of {', '.join(STEPS)}; default: {', '.join(FIRST)}"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything; default: %(default)s")
    parser.add_argument("--bundle", type=Path, default=ROOT / ".gpu-bundle", help="folder made by ci/gpu_bundle.sh")
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--out", type=Path, default=out, help=f"folder for what is found (default: {out})")
    parser.add_argument("--dry", action="store_true", help="all that a machine without a GPU can do")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="limits of steps so many times as long, as on emulated GPUs"
    )
    options = parser.parse_args()
    options.steps = list(STEPS) if options.steps == ["all"] else options.steps or FIRST
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}; use all, or some of {', '.join(STEPS)}")
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="gpu-suite-", ignore_cleanup_errors=True) as work:
        report = Suite(options, Path(work)).run()
    stem = f"gpu{'_dry' if options.dry else ''}_{report['date'][:10]}"
    (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / f"{stem}.txt").write_text(text_of(report))
    print(text_of(report))
    print(f"written to {options.out / stem}.json and .txt", flush=True)
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()
