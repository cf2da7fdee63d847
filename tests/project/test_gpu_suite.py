"""The GPU suite without a GPU: time limits, reports, the bundle, and a complete dry run."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import psutil
import pytest

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "ci"), str(_ROOT / "benchmarks")]

import gpu_ranks  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_steps import Record, Step, run_step  # noqa: E402
from gpu_suite import text_of  # noqa: E402
from rows import Rows  # noqa: E402


def python(name, code, limit_s=30.0, **more):
    return Step(name=name, command=[sys.executable, "-c", code], limit_s=limit_s, **more)


def ended(pid, timeout_s=20.0):
    """Return whether a process ends in time; a killed one needs a moment."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "out", "X")


def steps_of(record):
    """Return the last row of each finished step."""
    return {row["step"]: row["status"] for row in record.rows_since(0) if row.get("event") == "ended"}


def test_no_step_stops_the_others_or_loses_their_rows(record, tmp_path, monkeypatch):
    """One step fails, one is killed in the middle of a row, one hangs, each after a row; rows and logs are complete, no process is left."""
    pid_file = tmp_path / "pid"
    row = f"import sys; sys.path.insert(0, {str(_ROOT / 'benchmarks')!r}); from rows import add_row; add_row('it', {{'n': NUMBER}})\n"
    hang = (
        "import subprocess, sys, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('began', flush=True); child.wait()"
    )
    half = "import os\nwith open(os.environ['BENCHMARK_ROWS'], 'a') as file: file.write('{\"half')\n"
    monkeypatch.setattr(gpu_steps, "_GRACE_S", 0.5)
    outcomes = [
        run_step(each, record, left_s=100)
        for each in (
            python("fails", row.replace("NUMBER", "1") + "sys.exit('the reason')"),
            python("dies", row.replace("NUMBER", "2") + half + "os.kill(os.getpid(), 9)"),
            python("hangs", row.replace("NUMBER", "3") + hang, limit_s=4.0),
            python("passes", row.replace("NUMBER", "4") + "import os; print(os.environ['MINE'])", env={"MINE": "here"}),
        )
    ]
    failed, died, hung, passed = outcomes
    assert (failed.status, failed.exit_code, "the reason" in failed.output_tail) == ("failed", 1, True)
    assert (died.status, died.exit_code) == ("failed", -9)
    assert (hung.status, "began" in hung.output_tail) == ("timed out", True)
    assert (passed.status, passed.output_tail.split()[-1]) == ("passed", "here")
    assert ended(int(pid_file.read_text()))
    assert [found["n"] for found in record.rows_since(0) if "n" in found] == [1, 2, 3, 4]
    assert steps_of(record) == {"fails": "failed", "dies": "failed", "hangs": "timed out", "passes": "passed"}
    with tarfile.open(record.folder / "logs_X.tar") as logs:
        assert sorted(logs.getnames()) == [f"X_{name}.log" for name in ("dies", "fails", "hangs", "passes")]
    assert sorted(path.name for path in record.folder.iterdir()) == ["logs_X.tar", "rows.jsonl"]


def test_the_suites_remaining_time_limits_a_step(record, monkeypatch):
    """A step gets no more time than the suite has left."""
    monkeypatch.setattr(gpu_steps, "_GRACE_S", 0.5)
    outcome = run_step(python("sleeps", "import time; time.sleep(100)", limit_s=60), record, left_s=1.0)
    assert outcome.status == "timed out"


@pytest.mark.parametrize(
    ("used", "left"), [([100, 5000, 4000, 300], None), ([100, 5000, 4000, 4000], 3900), ([], None)]
)
def test_memory_of_a_step_comes_back_before_the_next(record, monkeypatch, used, left):
    """The device is polled until the memory is released or a time limit; missing memory is in the report."""
    answers = iter(used)
    monkeypatch.setattr(gpu_steps, "memory_used_mib", lambda: next(answers, used[-1] if used else None))
    monkeypatch.setattr(gpu_steps, "_MEMORY_S", 2.0)
    assert run_step(python("takes", "pass"), record, left_s=100).memory_left_mib == left


def test_tests_of_a_step_are_rows_as_they_end(record, tmp_path):
    """Failures and skips are rows with their messages, also before a crash, and the text summary contains them."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        (_ROOT / "tests" / "gpu" / "conftest.py")
        .read_text()
        .replace("Path(__file__).parents[2]", f"Path({str(_ROOT)!r})")
    )
    (folder / "test_it.py").write_text(
        "import os, pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs a wheel')\ndef test_left_out(): pass\n"
        "def test_crash(): os._exit(3)\ndef test_never(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", "ci/gpu-pytest.ini", str(folder)]
    outcome = run_step(Step(name="tests", command=command, limit_s=60), record, left_s=60)
    assert (outcome.status, outcome.exit_code) == ("failed", 3)
    assert outcome.counts == {"collected": 5, "passed": 1, "failed": 1, "skipped": 1}
    report = {
        "suite": "gpu_X",
        "date": "today",
        "dry": True,
        "ok": False,
        "steps": [{**outcome.to_dict(), "memory_left_mib": 777}],
        "rows": [{"script": "gpu_ddp", "backend": "ipc", "failed": "why"}],
    }
    text = text_of(json.loads(json.dumps(report)))
    for expected in ("FAILED, dry: no GPU", "1 passed, 1 failed", "assert 1 == 2", "needs a wheel", '"why"', "777 MiB"):
        assert expected in text


@pytest.mark.parametrize("damage", [None, "lost", "changed"])
def test_bundle(tmp_path, damage):
    """The bundle's packages and library are unpacked completely; a library with a bad part is left out and reported."""
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
    assert ("part-ab of 2 missing or damaged" in done.stdout) == bool(damage)
    if damage == "lost":
        # A later call provides the missing part without the others.
        (bundle / "nccl" / "part-ab").write_bytes(parts["part-ab"])
        (bundle / "nccl" / "part-aa").unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert unpacked.exists() == (damage != "changed")
    assert "site.tar.xz is unpacked already" in done.stdout
    assert ("libnccl.so.2 is unpacked already" in done.stdout) == (damage is None)


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "expected"),
    [("end", None), ("raise", "rank 1: .*the reason"), ("hang", r"ranks \[0, 1\] did not end")],
)
def test_a_case_of_a_benchmark_is_bounded(tmp_path, monkeypatch, how, expected):
    """Reported rows are kept, a failure or a hang has its reason, and no rank is left."""
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS.format(benchmarks=str(_ROOT / "benchmarks")))
    spec = {"backend": "gloo", "num_ranks": 2, "dry": True, "how": how, "nccl_library": None}
    monkeypatch.setenv("BENCHMARK_ROWS", str(tmp_path / "rows.jsonl"))
    rows = Rows("ranks")
    reason = gpu_ranks.run_case(str(script), {**spec, "mps": False}, 25.0, {})
    assert rows.read() == [{"backend": "gloo", "num_ranks": 2, "mps": False, "told": 2}]
    assert reason is None if expected is None else re.search(expected, reason), reason
    assert all(ended(p.pid) for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or []))


def test_a_refused_case_is_not_tried_with_more_ranks(monkeypatch, tmp_path):
    """NCCL's refusal and an exhausted budget are rows with the reason, without processes."""
    calls = []

    def refused(script, spec, timeout_s, env):
        calls.append(spec["num_ranks"])
        return "rank 0: Duplicate GPU detected"

    monkeypatch.setattr(gpu_ranks, "run_case", refused)
    monkeypatch.setenv("BENCHMARK_ROWS", str(tmp_path / "rows.jsonl"))
    options = type("Options", (), {"budget_s": 100.0, "case_s": 10.0, "dry": True, "nccl_library": None, "mps": False})
    cases = gpu_ranks.Cases("script.py", options)
    for num_ranks in (2, 4):
        cases.run("nccl", num_ranks)
    assert calls == [2]
    assert [(row["num_ranks"], row["failed"]) for row in cases.results()["rows"]] == [
        (2, "rank 0: Duplicate GPU detected"),
        (4, "rank 0: Duplicate GPU detected"),
    ]
    options.budget_s = 0.0
    late = gpu_ranks.Cases("script.py", options)
    late.run("gloo", 2)
    assert "budget" in late.results()["rows"][0]["failed"]
    options.budget_s, options.mps = 100.0, True
    monkeypatch.setenv("PATH", str(tmp_path))
    without = gpu_ranks.Cases("script.py", options)
    with without.running():
        without.run("gloo", 2)
    assert "not installed" in without.results()["rows"][0]["failed"]


@pytest.mark.full
def test_benchmarks_save_without_ray(tmp_path):
    """ipc is also measured on hosts without Ray."""
    script = _ROOT / "benchmarks" / "gpu_probe.py"
    code = f"import runpy, sys; sys.modules['ray'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{script.parent}"}
    command = [sys.executable, "-c", code, "--dry", "--out", tmp_path]
    subprocess.run(list(map(str, command)), env=environment, timeout=100, check=True)
    (saved,) = tmp_path.glob("gpu_probe_*.json")
    rows = json.loads(saved.read_text())["rows"]
    assert [row["question"] for row in rows[1:]] == ["identity", "memory", "event", "semaphore", "copy", "killed"]
    assert {row["failed"] for row in rows[1:]} == {"dry"}


@pytest.mark.parametrize(("exit_code", "expected"), [(0, None), (1, "no permission")])
def test_mps_daemon_of_its_own(tmp_path, monkeypatch, exit_code, expected):
    """A daemon is started with its own folder and stopped; one that does not start is a reason, not an error."""
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: call"),
        (["x"], "'A', 'B', 'C', 'D', 'all'"),
        (["A", "--fault", "imports=x"], "STEP=kill"),
    ],
)
def test_wrong_use(arguments, expected):
    """The error for a wrong option lists the valid ones."""
    done = subprocess.run(
        [_ROOT / "ci" / "gpu.sh", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert expected in done.stderr


STEPS = {
    "A": ["imports", "gpu_probe", "right", "gpu_all_reduce", "gpu_all_reduce_bf16", "gpu_all_gather", "gpu_ddp"],
    "B": ["imports", "tests_ipc", "tests_staged"],
    "C": ["imports", "tests_ray"],
    "D": [
        "imports",
        "gpu_handoff",
        "gpu_handoff_mps",
        "gpu_all_reduce_mps",
        "gpu_all_reduce_nccl",
        "gpu_ddp_mps",
        "tests_nccl",
    ],
}
FAULTS = ("exception", "kill", "hang")


def dry_run(out, faults):
    """Return rows of all calls in a dry run with faults in steps by name; no folder of a step is left."""
    command = [_ROOT / "ci" / "gpu.sh", "all", "--dry", "--bundle", out / "none", "--out", out]
    for step, kind in faults.items():
        command += ["--fault", f"{step}={kind}"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": folder}
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=850, check=False, env=environment
        )
        assert not list(Path(folder).glob("gpu-*"))
    assert done.returncode == bool(faults), done.stdout + done.stderr
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Return folder and rows of a dry run without faults."""
    folder = tmp_path_factory.mktemp("clean")
    return folder, dry_run(folder, {})


def ends_of(rows):
    """Return the last row of each step, by call and step."""
    return {(row["call"], row["step"]): row for row in rows if row.get("event") == "ended"}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_dry_run(clean):
    """ci/gpu.sh --dry imports everything, collects all tests, runs every benchmark on CPUs and writes all files of a call."""
    folder, rows = clean
    steps = ends_of(rows)
    assert list(steps) == [(call, step) for call, names in STEPS.items() for step in names]
    assert {row["status"] for row in steps.values()} == {"passed"}
    counts = {step: row["counts"] for (_, step), row in steps.items()}
    tests = {step: found["collected"] > 4 for step, found in counts.items() if "collected" in found}
    assert tests == dict.fromkeys(("right", "tests_ipc", "tests_staged", "tests_ray", "tests_nccl"), True)
    assert (counts["gpu_probe"], counts["gpu_all_reduce"]) == ({"rows": 1, "failed rows": 6}, {"rows": 14})
    names = [
        f"{stem}.{end}" for call in STEPS for stem in [f"gpu_{call}_dry_{rows_date(folder)}"] for end in ("json", "txt")
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*names, "rows.jsonl", *(f"logs_{call}.tar" for call in STEPS)]
    )
    measured = {row["backend"] for row in rows if row.get("script") == "gpu_all_reduce" and "median_ms" in row}
    assert measured >= {"copy", "gloo", "staged", "ipc", "ipc_split", "ipc_one_pass", "ipc_4_mib"}
    # A backend that cannot run here is a row with its reason.
    failed = {row["backend"] for row in rows if row.get("script") == "gpu_all_reduce" and "failed" in row}
    assert failed >= {"nccl", "nccl_hostid"}
    ddp = [row for row in rows if row.get("script") == "gpu_ddp" and "samples_per_s" in row]
    assert {row["model"] for row in ddp} == {"resnet", "transformer"}
    assert {row["how"] for row in ddp if row["backend"] == "staged"} == {"ddp", "fsdp2"}
    assert [row["way"] for row in rows if row.get("script") == "gpu_handoff" and "way" in row] == ["number"]
    assert any("nproc" in row["facts"] for row in rows if row.get("script") == "gpu_probe" and "facts" in row)


def rows_date(folder):
    """Return the day in the names of the reports."""
    return next(folder.glob("gpu_A_dry_*.json")).stem[-10:]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [0, 1])
def test_a_fault_in_one_step_leaves_the_rows_of_all_others(clean, tmp_path, first):
    """Every second step in turn raises an error, is killed or hangs."""
    names = list(dict.fromkeys(step for steps in STEPS.values() for step in steps if step != "imports"))[first::2]
    faults = {step: FAULTS[number % 3] for number, step in enumerate(names)}
    steps = ends_of(dry_run(tmp_path, faults))
    assert {step: row["status"] for (_, step), row in steps.items()} == {
        step: {"hang": "timed out", None: "passed"}.get(faults.get(step), "failed") for _, step in steps
    }
    whole = {key: row["counts"] for key, row in ends_of(clean[1]).items() if key[1] not in faults}
    assert {key: row["counts"] for key, row in steps.items() if key in whole} == whole
    for call in STEPS:
        with tarfile.open(tmp_path / f"logs_{call}.tar") as logs:
            assert sorted(logs.getnames()) == sorted(f"{call}_{step}.log" for step in STEPS[call])
