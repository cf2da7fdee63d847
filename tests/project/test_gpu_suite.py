"""The GPU suite where there is no GPU: limits, reports, the bundle, and a dry run of it all."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "ci"), str(_ROOT / "benchmarks")]

import gpu_ranks  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_steps import Step, run_together  # noqa: E402
from gpu_suite import text_of  # noqa: E402


def python(name, code, limit_s=30.0, **more):
    return Step(name=name, command=[sys.executable, "-c", code], limit_s=limit_s, **more)


def ended(pid, timeout_s=20.0):
    """Whether a process ends in time; a killed one takes a moment."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_no_step_stops_the_others(tmp_path, monkeypatch):
    """A step that fails and one that hangs are reported as that, with their output, and the next passes."""
    pid_file = tmp_path / "pid"
    hang = (
        "import subprocess, sys, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('began', flush=True); child.wait()"
    )
    monkeypatch.setattr(gpu_steps, "_GRACE_S", 0.5)
    steps = [
        python("fails", "import sys; sys.exit('the reason')"),
        python("hangs", hang, limit_s=4.0),
        python("passes", "import os; print(os.environ['MINE'])", env={"MINE": "here"}),
    ]
    failed, hung, passed = run_together(steps, tmp_path, left_s=100)
    assert (failed.status, failed.exit_code, "the reason" in failed.output_tail) == ("failed", 1, True)
    assert (hung.status, "began" in hung.output_tail) == ("timed out", True)
    assert (passed.status, passed.output_tail.strip()) == ("passed", "here")
    assert ended(int(pid_file.read_text()))


def test_what_is_left_of_the_suites_time_bounds_a_step(tmp_path, monkeypatch):
    """A step gets no more than the suite has left."""
    monkeypatch.setattr(gpu_steps, "_GRACE_S", 0.5)
    (outcome,) = run_together([python("sleeps", "import time; time.sleep(100)", limit_s=60)], tmp_path, left_s=1.0)
    assert outcome.status == "timed out"


def test_tests_of_a_step_are_counted(tmp_path):
    """Failures and skips come with their texts, and the text summary has them."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs a wheel')\ndef test_left_out(): pass\n"
    )
    junit = tmp_path / "it.xml"
    command = [sys.executable, "-m", "pytest", "-c", "ci/gpu-pytest.ini", f"--junitxml={junit}", str(tmp_path)]
    (outcome,) = run_together([Step(name="tests", command=command, limit_s=60, junit=junit)], tmp_path, left_s=60)
    assert outcome.status == "failed"
    assert outcome.counts == {"passed": 1, "failed": 1, "skipped": 1}
    report = {
        "suite": "gpu_tests",
        "date": "today",
        "dry": True,
        "ok": False,
        "environment": {},
        "steps": [outcome.to_dict()],
        "benchmarks": {"gpu_ddp": {"rows": [{"backend": "ipc", "failed": "why"}]}},
    }
    text = text_of(json.loads(json.dumps(report)))
    for expected in ("FAILED, dry: no GPU", "1 passed, 1 failed, 1 skipped", "assert 1 == 2", "needs a wheel", '"why"'):
        assert expected in text


@pytest.mark.parametrize("damage", [None, "lost", "changed"])
def test_bundle(tmp_path, damage):
    """The bundle's packages and library come out whole; a library with a bad part is left out and reported."""
    bundle = tmp_path / "bundle"
    (bundle / "nccl").mkdir(parents=True)
    (tmp_path / "ray.py").write_text("here = True\n")
    with tarfile.open(bundle / "site.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "ray.py", "./ray.py")
    library = bytes(range(256)) * 20_000
    packed = lzma.compress(library)
    parts = {"part-aa": packed[:300], "part-ab": packed[300:]}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in parts.items())
    (bundle / "nccl" / "SHA256SUMS").write_text(sums)
    for name, data in parts.items():
        (bundle / "nccl" / name).write_bytes(data)
    if damage == "lost":
        (bundle / "nccl" / "part-ab").unlink()
    elif damage == "changed":
        (bundle / "nccl" / "part-ab").write_bytes(b"x")
    target = tmp_path / "target"
    command = [sys.executable, _ROOT / "ci" / "gpu_unpack.py", bundle, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (target / "site" / "ray.py").read_text() == "here = True\n"
    unpacked = target / "libnccl.so.2"
    assert (unpacked.read_bytes() if unpacked.exists() else None) == (None if damage else library)
    assert ("part-ab is missing or damaged" in done.stdout) == bool(damage)


_RANKS = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from gpu_ranks import in_rank

def body(rank):
    rank.tell({{"told": rank.num_ranks}})
    if rank.spec["how"] == "raise" and rank.rank == 1:
        raise RuntimeError("Error: the reason")
    if rank.spec["how"] == "hang":
        time.sleep(100)

in_rank(body)
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("end", None),
        ("raise", "rank 1: .*the reason"),
        pytest.param("hang", r"ranks \[0, 1\] did not end", marks=pytest.mark.full),
    ],
)
def test_a_case_of_a_benchmark_is_bounded(tmp_path, how, expected):
    """Rows that were reported are kept, a failure or a hang has its reason, and no rank is left."""
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS.format(benchmarks=str(_ROOT / "benchmarks")))
    spec = {"backend": "gloo", "num_ranks": 2, "dry": True, "how": how, "nccl_library": None}
    rows, reason = gpu_ranks.run_case(str(script), spec, 25.0, {})
    assert rows == [{"told": 2}]
    assert reason is None if expected is None else re.search(expected, reason), reason
    assert all(ended(p.pid) for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or []))


def test_what_was_refused_is_not_tried_with_more_ranks(monkeypatch):
    """NCCL's refusal and a spent budget are rows with the reason, without processes."""
    calls = []

    def refused(script, spec, timeout_s, env):
        calls.append(spec["num_ranks"])
        return [], "rank 0: Duplicate GPU detected"

    monkeypatch.setattr(gpu_ranks, "run_case", refused)
    options = type("Options", (), {"budget_s": 100.0, "case_s": 10.0, "dry": True, "nccl_library": None})
    cases = gpu_ranks.Cases("script.py", options)
    for num_ranks in (2, 4):
        cases.run("nccl", num_ranks)
    assert calls == [2]
    assert [(row["num_ranks"], row["failed"]) for row in cases.rows] == [
        (2, "rank 0: Duplicate GPU detected"),
        (4, "rank 0: Duplicate GPU detected"),
    ]
    options.budget_s = 0.0
    late = gpu_ranks.Cases("script.py", options)
    late.run("gloo", 2)
    assert "budget" in late.rows[0]["failed"]


@pytest.mark.parametrize(("exit_code", "expected"), [(0, None), (1, "no permission")])
def test_mps_daemon_of_its_own(tmp_path, monkeypatch, exit_code, expected):
    """A daemon is started on a folder of its own and stopped; one that does not start is a reason, not an error."""
    program = tmp_path / "nvidia-cuda-mps-control"
    calls = tmp_path / "calls"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >>{calls}; echo "no permission" >&2; '
        f"exit {exit_code}; fi\nread word; echo $word $CUDA_MPS_PIPE_DIRECTORY >>{calls}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with gpu_ranks.mps() as started:
        assert (started if expected else None) == expected
        folder = None if expected else started["CUDA_MPS_PIPE_DIRECTORY"]
    lines = calls.read_text().splitlines()
    assert len(lines) == 1 if expected else lines == [f"start {folder}", f"quit {folder}"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with gpu_ranks.mps() as missing:
        assert missing == "nvidia-cuda-mps-control is not installed"


def test_wrong_use():
    """The error of a wrong option lists the right ones."""
    done = subprocess.run(
        [_ROOT / "ci" / "gpu.sh", "--part", "x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "'all', 'tests', 'benchmarks'" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_dry_run(tmp_path):
    """ci/gpu.sh --dry imports all, collects all tests, runs every benchmark on CPUs and leaves both summaries."""
    command = [_ROOT / "ci" / "gpu.sh", "--dry", "--bundle", tmp_path / "none", "--out", tmp_path]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=850, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {path.stem.split("_dry")[0]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(reports) == {"gpu_tests", "gpu_benchmarks"}
    assert len(list(tmp_path.glob("*.txt"))) == 2
    for report in reports.values():
        assert (report["ok"], report["dry"]) == (True, True)
        assert report["environment"]["imports"]["missing"] == {}
        assert all(step["status"] == "passed" for step in report["steps"])
    collected = {step["name"]: step["counts"]["collected"] for step in reports["gpu_tests"]["steps"] if step["counts"]}
    assert collected["tests"] > 10
    assert collected["tests_nccl"] > 5
    assert collected["tests_staged"] > 10
    results = reports["gpu_benchmarks"]["benchmarks"]
    assert set(results) == {"gpu_handoff", "gpu_all_reduce", "gpu_ddp"}
    all_reduce = results["gpu_all_reduce"]["rows"]
    assert {(row["backend"], row["num_ranks"]) for row in all_reduce if "median_ms" in row} >= {
        ("copy", 1),
        ("gloo", 2),
        ("staged", 2),
        ("staged_gloo", 2),
    }
    # A backend that cannot run here is a row with its reason.
    assert {row["backend"] for row in all_reduce if "failed" in row} >= {"nccl", "nccl_hostid"}
    assert {row["model"] for row in results["gpu_ddp"]["rows"] if "samples_per_s" in row} == {"resnet", "transformer"}
    assert {row["how"] for row in results["gpu_ddp"]["rows"] if row["backend"] == "staged"} == {"ddp", "fsdp2"}
    assert [row["way"] for row in results["gpu_handoff"]["rows"]] == ["number"]
