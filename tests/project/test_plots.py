"""The figures of the benchmarks are drawn from the committed results."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "benchmarks" / "results"


def run(script, *arguments):
    command = [sys.executable, _ROOT / "benchmarks" / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def made_up_scale(environment):
    """Return a simulated result of benchmarks/scale.py."""
    simulated = [
        {
            "num_workers": num_workers,
            **dict.fromkeys(("probe_s", "plan_s", "start_s", "report_s"), num_workers / 1e5),
            "rounds": 2.0,
            "bytes_to_workers": {"probe_worker": num_workers, "start_worker": num_workers},
            "bytes_from_workers": {"probe_worker": num_workers, "start_worker": num_workers},
        }
        for num_workers in (1_000, 10_000)
    ]
    real = [{"num_ranks": num_ranks, "total_s": 1.0, "verification_s": 0.1} for num_ranks in (2, 8)]
    return {"date": "2999-12-31", "environment": environment, "simulated": simulated, "real": real}


@pytest.mark.full
def test_every_kind_is_drawn(tmp_path):
    """One figure per kind of result, from the newest one, with its date and hardware; other JSON files are ignored."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    results, out = tmp_path / "results", tmp_path / "figures"
    shutil.copytree(_RESULTS, results, ignore=shutil.ignore_patterns("*.png"))
    old = json.loads(max(results.glob("planning_*.json")).read_text())
    (results / "planning_2999-12-31.json").write_text(json.dumps({**old, "date": "2999-12-31"}))
    (results / "scale_2999-12-31.json").write_text(json.dumps(made_up_scale(old["environment"])))
    done = run("plots.py", "--results", results, "--out", out)
    assert done.returncode == 0, done.stderr
    drawn = {path.stem: path.read_text() for path in out.glob("*.svg")}
    assert set(drawn) >= {"start_v2", "planning", "ipc", "ipc_demo", "scale"}
    for picture in drawn.values():
        assert re.search(r"<!-- \d{4}-\d{2}-\d{2}, .+, \d+ cores, .*torch .+ -->", picture)
    assert all("2999-12-31" in drawn[name] for name in ("planning", "scale"))


@pytest.mark.parametrize("script", ["plots.py", "tables.py"])
def test_docs_are_up_to_date(script):
    """Figures and numbers of the docs are those of the newest results; if not, run the script without --check."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    done = run(script, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
