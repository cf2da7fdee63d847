"""Steps of ci/cuda.py on the emulated CUDA runtime, their results, and their table. Standard library only.

A step is a command with a time limit, on one or several torch releases. Every change must pass the steps in `SMOKE`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import ROOT

RESULTS = ROOT / "ci" / "cuda_results.jsonl"
PAGE = ROOT / "docs" / "development" / "gpu-runs.md"
_BEGIN, _END = "<!-- table: ci/cuda.py --steps --record -->\n", "<!-- end of the table -->"
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
_PYTEST = ("pytest", "-p", "no:cacheprovider", "-q", "-rs", "--full")

# For the tests with several devices; all others use the first device.
_TWO_GPUS = {"CUDA_RIG_DEVICES": "2"}


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        what: Description for the table.
        command: Program and arguments, in the project's folder.
        limit_s: Time limit in seconds.
        env: Environment variables besides those of the emulation.
    """

    what: str
    command: Sequence[str]
    limit_s: float = 900.0
    env: Mapping[str, str] = field(default_factory=dict)


def _tests(what: str, *arguments: str, limit_s: float = 900.0, **more: Any) -> Step:
    return Step(what, (*_PYTEST, *arguments), limit_s, **more)


def _ray(engine: str) -> dict[str, str]:
    return {"RAY_TRAIN_V2_ENABLED": engine}


STEPS = {
    "runtime": _tests("the rig itself: as strict as a GPU", "tests/cuda/test_runtime.py"),
    "errors": _tests("errors on demand, in torch's own words", "tests/cuda/test_errors.py"),
    "nccl": _tests(
        "torch's ProcessGroupNCCL over the emulated NCCL; `check_devices`, device meshes and the end of Gloo's groups beside it",
        "tests/cuda/test_nccl.py",
        "tests/cuda/test_device_check.py",
        "tests/unit/test_group_end.py",
    ),
    "counters": _tests("copies, kernels, events and waits of a collective", "tests/cuda/test_counters.py"),
    "ipc": _tests(
        "every test of `ipc` on device memory, 1 to 8 ranks", "tests/gpu/test_gpu_ipc.py", limit_s=1800.0, env=_TWO_GPUS
    ),
    "staged": _tests(
        "every test of `staged` and of the verification",
        "tests/gpu/test_gpu_staged.py",
        "tests/gpu/test_gpu_verify.py",
        env=_TWO_GPUS,
    ),
    "training": _tests(
        "Ray: losses of one process with each backend, 2 to 8 ranks, Tune, libraries, memory caps, the benchmark of `ipc`",
        "tests/gpu/test_gpu_training.py",
        "tests/gpu/test_gpu_bench.py",
        limit_s=3600.0,
        env=_TWO_GPUS,
    ),
    "starts": _tests(
        "Ray: stock beside ours, every ScalingConfig, MIG, UUIDs, two jobs", "tests/cuda/test_starts.py", limit_s=3600.0
    ),
    "failing starts": _tests(
        "Ray: starts that fail or fall back",
        "tests/cuda/test_failing_starts.py",
        "tests/cuda/test_nccl_starts.py",
        limit_s=3600.0,
    ),
    "jobs": _tests("Ray: elastic groups, restarts, FSDP2, DCP, checkpoints", "tests/cuda/test_jobs.py", limit_s=5400.0),
    "commands": _tests("`doctor`, `plan`, `test`, `run`, `demo`", "tests/cuda/test_commands.py", limit_s=1200.0),
    "gpu.sh": Step(
        "the first call of `ci/gpu.sh`, with limits four times as long",
        ("bash", "ci/gpu.sh", "--minutes", "40", "--scale", "4", "--out", "{out}"),
        2700.0,
        {"PYTHON": "python"},
    ),
}
# Time slices, shared queues, implicit waits and other delays.
STEPS |= {
    f"{name} like a GPU": replace(
        STEPS[name],
        what="the same with `--like gpu` and another seed",
        env={**STEPS[name].env, "CUDA_RIG_LIKE": "gpu", "CUDA_RIG_SEED": "1"},
    )
    for name in ("runtime", "ipc", "staged", "training")
}
# Three minutes: the first seed with Gloo, staged, ipc, and NCCL's refusal. At a load of 10 to 20 on two cores it took 177 s.
SMOKE = _tests(
    "the first seed",
    "tests/cuda/test_starts.py::test_the_first_seed[2.28.9-v2]",
    limit_s=600.0,
)


def run(start: Callable[..., int], step: Step, variables: Mapping[str, str], log: Path) -> dict[str, Any]:
    """Run one step with its output in a file; return its result.

    Args:
        start: ``Command.run`` of ci/cuda.py.
        step: The step.
        variables: Environment of the emulation.
        log: File for the output.
    """
    started = time.monotonic()
    command = [word.replace("{out}", str(log.with_suffix(".out"))) for word in step.command]
    with log.open("w") as file:
        code = start(command, {**variables, **step.env}, file, step.limit_s)
    seconds = time.monotonic() - started
    counts = {word: int(number) for number, word in _COUNTS.findall(_last_lines(log.read_text(errors="replace")))}
    result = "timed out" if seconds >= step.limit_s else "failed" if code else "passed"
    return {"result": result, "seconds": round(seconds), "counts": counts}


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-3:])


def record(torch: str, ray: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace earlier results of the same steps by these, and update the table of the page."""
    known = {cell["torch"]: cell for cell in read()}
    steps = {**known.get(torch, {}).get("steps", {}), **found}
    known[torch] = {
        "torch": torch,
        "ray": ray,
        "python": "{}.{}".format(*sys.version_info[:2]),
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "steps": steps,
    }
    RESULTS.write_text("".join(f"{json.dumps(cell)}\n" for cell in known.values()))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}{table(list(known.values()))}\n{_END}{after}", encoding="utf-8")


def read() -> list[dict[str, Any]]:
    """Return the recorded results, a cell for each torch release."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(cells: list[dict[str, Any]]) -> str:
    """Return the steps with a column for each torch release."""
    lines = [
        _row("Step", "What", *(f"torch {cell['torch']}, Ray {cell['ray']}, Python {cell['python']}" for cell in cells))
    ]
    lines.append("|" + "---|" * (len(cells) + 2))
    for name, step in STEPS.items():
        lines.append(_row(f"`{name}`", step.what, *(_cell(cell["steps"].get(name)) for cell in cells)))
    lines.append(_row("latest step run on", "", *(f"{cell['date']}, {cell['cores']} cores" for cell in cells)))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    counts = ", ".join(f"{number} {word}" for word, number in found["counts"].items())
    return f"{counts or found['result']}, {found['seconds']} s"
