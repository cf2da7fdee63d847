"""The documentation site builds without a warning, and its reference pages match the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ray_fracbackend
from ray_fracbackend import ipc
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.report.start_report import Progress, document

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"


def run(*command):
    """Run a command with the programs of this environment; return its output if it failed, else None."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    return done.stdout + done.stderr if done.returncode else None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_site_builds():
    """MkDocs builds the site without a warning, and no page loads anything from the network."""
    pytest.importorskip("mkdocstrings_handlers", reason="the extra docs is not installed")
    assert run(sys.executable, _ROOT / "ci" / "docs.py") is None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_notebook_runs():
    pytest.importorskip("nbclient", reason="the extra test is not installed")
    jupyter = Path(sys.executable).with_name("jupyter-execute")
    assert run(jupyter, "--timeout", "300", _ROOT / "examples" / "fractional_gpu.ipynb") is None


def test_api_page_has_every_public_name():
    """docs/api.md contains each name of the package and of ray_fracbackend.ipc once, and no missing name."""
    named = re.findall(r"^::: (ray_fracbackend\.\S+)$", (_DOCS / "api.md").read_text(), flags=re.MULTILINE)
    public = {f"ray_fracbackend.{name}" for name in ray_fracbackend.__all__}
    public |= {f"ray_fracbackend.ipc.{name}" for name in ipc.__all__ if name != "BACKEND_NAME"}
    assert public - set(named) == set()
    assert len(named) == len(set(named))


def test_api_page_has_every_key_of_the_report():
    """The table of the JSON names each key of a report once, and each key of its error."""
    page = (_DOCS / "api.md").read_text(encoding="utf-8")
    section = page.partition("### The report as JSON\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (`[^|]+`) \| (.+) \|$", section, flags=re.MULTILINE))
    named = [key for cell in rows for key in re.findall(r"`(\w+)`", cell)]
    report = document(Progress(settings=Settings().to_plain()), VerificationError("x"))
    assert sorted(named) == sorted(report)
    assert set(report["error"]) <= set(re.findall(r"`(\w+)`", rows["`error`"]))


# Constants of the package that look like environment variables but are not.
_OTHER_CONSTANTS = {"BACKEND_NAME", "CREATE_NO_WINDOW", "CUDA_MPS", "SC_CLK_TCK", "STRICT_PACK", "STRICT_SPREAD"}


def test_environment_page_has_every_variable():
    """docs/environment.md has a row for each variable in the code, and for no unknown RAY_FRACBACKEND_*."""
    sources = [path.read_text(encoding="utf-8") for path in (_ROOT / "ray_fracbackend").rglob("*.py")]
    code = set(re.findall(r"""["']([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)["']""", "\n".join(sources))) - _OTHER_CONSTANTS
    first_cells = re.findall(r"^\| ([^|]+) \|", (_DOCS / "environment.md").read_text(), flags=re.MULTILINE)
    rows = [name for cell in first_cells for name in re.findall(r"`([A-Z][A-Z0-9_]*[A-Z0-9])`", cell)]
    assert code - set(rows) == set()
    assert {name for name in rows if name.startswith("RAY_FRACBACKEND_")} <= code
    assert len(rows) == len(set(rows))
