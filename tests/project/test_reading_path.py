"""The reading path of docs/development/architecture.md lists the modules that a start imports, within its size limits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "ray_fracbackend"
_PAGE = (_ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("## Reading path")[2].partition("\n## ")[0]
# Modules that FracTorchConfig imports on the driver and a start on a worker.
_IMPORTS = "import sys, ray_fracbackend.config; print(*(n for n in sys.modules if n.startswith('ray_fracbackend.')))"


def reading_path() -> list[str]:
    """Return the modules of the path, in order, such as ``worker/probe.py``."""
    return re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", _SECTION, flags=re.MULTILINE)


def helpers() -> list[str]:
    """Return the modules that they call."""
    found = []
    for folder, names in re.findall(r"^\| `(\.|\w+/)` \| (.*) \|$", _SECTION, flags=re.MULTILINE):
        found += [f"{folder.removeprefix('.')}{name}.py" for name in re.findall(r"`(\w+)`", names)]
    return found


def test_it_is_what_a_start_imports() -> None:
    """Path and helpers are all imported modules, each once; modules for failures or special requests are not imported."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True, cwd=_ROOT)
    names = (name.partition(".")[2].replace(".", "/") for name in done.stdout.split())
    imported = [f"{name}.py" for name in names if not (_PACKAGE / name).is_dir()]
    assert sorted(imported) == sorted([*reading_path(), *helpers()])


def test_it_is_short() -> None:
    """The path has at most 12 modules and 2,500 lines."""
    modules = reading_path()
    assert len(modules) <= 12
    assert sum(len((_PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in modules) <= 2500
