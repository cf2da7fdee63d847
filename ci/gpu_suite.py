"""Runs all GPU tests and benchmarks and writes one JSON and one text summary; called by ci/gpu.sh.

No step stops the next; each has a limit of its own, and a part as a whole ends well under 10 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT
from gpu_steps import Outcome, Step, run_step, run_together

PARTS = ("tests", "benchmarks")
# Seconds of a whole part.
PART_S = 540.0
BENCHMARKS_S = {"gpu_handoff": 60.0, "gpu_all_reduce": 230.0, "gpu_ddp": 160.0}
_SLACK_S = 15.0
# Of the backends alone, without Ray.
_BACKEND_TESTS = {"tests_ipc": "tests/gpu/test_gpu_ipc.py", "tests_staged": "tests/gpu/test_gpu_staged.py"}

# The host's packages as the package itself imports them, so that what is missing has a name before anything runs.
_CHECK = """
import importlib, json, platform, sys
found, missing = {"python": platform.python_version()}, {}
for name in ("torch", "numpy", "pandas", "pyarrow", "pytest", "packaging", "ray", "psutil", "pynvml", "ray.train.torch",
             "ray.tune", "ray_fracbackend.config", "ray_fracbackend.ipc"):
    try:
        module = importlib.import_module(name)
        found[name] = str(getattr(module, "__version__", "present"))
    except Exception as error:
        missing[name] = f"{type(error).__name__}: {error}"
if "torch" in found:
    import torch
    found["cuda"] = torch.version.cuda
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if "ray_fracbackend.config" in found:
    from ray_fracbackend.decide.worker_info import version_text
    from ray_fracbackend.worker.nccl_library import loaded_nccl_version
    found["nccl"] = version_text(loaded_nccl_version())
print(json.dumps({"found": found, "missing": missing}))
sys.exit(bool(missing))
"""


class Suite:
    """One run of one part."""

    def __init__(self, part: str, options: argparse.Namespace, work: Path) -> None:
        self._part, self._options, self._work = part, options, work
        self._end = time.monotonic() + PART_S
        self.outcomes: list[Outcome] = []
        self.environment: dict[str, Any] = {}
        self._env: dict[str, str] = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        self._library: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the steps; the report as plain values."""
        self._unpack()
        self._check()
        groups = self._tests() if self._part == "tests" else self._benchmarks()
        for steps in groups:
            self.outcomes += run_together(steps, self._work, self._end - time.monotonic())
        return self._report()

    def _step(self, name: str, command: list[str], limit_s: float, **more: Any) -> Step:
        env = {**self._env, **more.pop("env", {})}
        return Step(name=name, command=[sys.executable, *command], limit_s=limit_s, env=env, **more)

    def _unpack(self) -> None:
        path = [str(ROOT)]
        if self._options.bundle.is_dir():
            target = self._work / "bundle"
            step = self._step("unpack", ["ci/gpu_unpack.py", str(self._options.bundle), str(target)], 150)
            self.outcomes.append(run_step(step, self._work, self._end - time.monotonic()))
            path += [str(target / "site")]
            library = target / "libnccl.so.2"
            self._library = library if library.is_file() else None
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self._env["PYTHONPATH"] = os.pathsep.join(path)

    def _check(self) -> None:
        for name, env in {"imports": {}, "imports_nccl": self._preload()}.items():
            if name == "imports" or env:
                outcome = run_step(
                    self._step(name, ["-c", _CHECK], 60, env=env), self._work, self._end - time.monotonic()
                )
                outcome.command[-1] = "the check of imports"
                self.outcomes.append(outcome)
                lines = [line for line in outcome.output_tail.splitlines() if line.startswith('{"found')]
                self.environment[name] = json.loads(lines[-1]) if lines else None

    def _preload(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library)} if self._library else {}

    def _tests(self) -> list[list[Step]]:
        """All side by side: they prove answers, not times. The newer NCCL is for those that need it alone."""
        with_ray = ["tests/gpu", *(f"--ignore={path}" for path in _BACKEND_TESTS.values())]
        return [
            [
                self._pytest("tests", [*with_ray, "-k", "not nccl"], 420),
                self._pytest("tests_nccl", [*with_ray, "-k", "nccl or stock"], 420, self._preload()),
                *(self._pytest(name, [path], 420) for name, path in _BACKEND_TESTS.items()),
            ]
        ]

    def _pytest(self, name: str, arguments: list[str], limit_s: float, env: dict[str, str] | None = None) -> Step:
        junit = self._work / f"{name}.xml"
        command = ["-m", "pytest", "-c", "ci/gpu-pytest.ini", "--rootdir", ".", "-v", f"--junitxml={junit}", *arguments]
        if self._options.dry:
            command.append("--collect-only")
        return self._step(name, command, limit_s, env=env or {}, junit=junit)

    def _benchmarks(self) -> list[list[Step]]:
        """One after the other: they share what they measure."""
        groups = []
        for name, budget_s in BENCHMARKS_S.items():
            command = [f"benchmarks/{name}.py", "--out", str(self._work / "results"), "--budget-s", str(budget_s)]
            command += ["--dry"] if self._options.dry else []
            command += ["--nccl-library", str(self._library)] if self._library else []
            groups.append([self._step(name, command, budget_s + _SLACK_S)])
        return groups

    def _report(self) -> dict[str, Any]:
        results = {}
        for path in sorted((self._work / "results").glob("*.json")):
            results[path.stem.rpartition("_")[0]] = json.loads(path.read_text())
        return {
            "suite": f"gpu_{self._part}",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "dry": self._options.dry,
            "ok": all(outcome.status == "passed" for outcome in self.outcomes),
            "seconds": round(PART_S - (self._end - time.monotonic()), 1),
            "environment": self.environment,
            "steps": [outcome.to_dict() for outcome in self.outcomes],
            "benchmarks": results,
        }


def text_of(report: dict[str, Any]) -> str:
    """The report for people: steps, what failed and was skipped, one line a measured row."""
    dry = ", dry: no GPU was used" if report["dry"] else ""
    lines = [f"{report['suite']} {report['date']}: {'all passed' if report['ok'] else 'FAILED'}{dry}", ""]
    for name, found in report["environment"].items():
        lines.append(f"{name}: {json.dumps(found)}")
    for step in report["steps"]:
        counts = ", ".join(f"{count} {what}" for what, count in step["counts"].items())
        lines.append(f"{step['name']:<16}{step['status']:<10}{step['seconds']:>7.1f} s  {counts}".rstrip())
    for step in report["steps"]:
        lines += [f"\nFAILED {bad['test']}\n{bad['text']}" for bad in step["failures"]]
        lines += [f"skipped {skip['test']}: {skip['reason']}" for skip in step["skips"]]
        if step["status"] != "passed" and not step["failures"]:
            lines.append(f"\n{step['name']} {step['status']}, its last output:\n{step['output_tail']}")
    for name, result in report["benchmarks"].items():
        lines += ["", name, *(json.dumps(row) for row in result["rows"])]
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ci/gpu.sh", description=__doc__)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--bundle", type=Path, default=ROOT / ".gpu-bundle", help="folder made by ci/gpu_bundle.sh")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the summaries")
    parser.add_argument("--dry", action="store_true", help="all that a machine without a GPU can do")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    ok = True
    for part in PARTS if options.part == "all" else (options.part,):
        with tempfile.TemporaryDirectory(prefix="gpu-suite-", ignore_cleanup_errors=True) as work:
            report = Suite(part, options, Path(work)).run()
        ok = ok and report["ok"]
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"gpu_{part}{'_dry' if options.dry else ''}_{report['date'][:10]}"
        (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / f"{stem}.txt").write_text(text_of(report))
        print(text_of(report))
        print(f"written to {options.out / stem}.json and .txt", flush=True)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
