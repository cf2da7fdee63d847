"""The version matrix, `nox -s matrix`, whose missing interpreters are left out and named."""

import sys
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent / "ci"))

import matrix as cells

nox.options.error_on_missing_interpreters = False


@nox.session(python=list(cells.PYTHONS), venv_backend="venv")
@nox.parametrize("torch", cells.TORCHES)
def matrix(session: nox.Session, torch: str) -> None:
    """All Rays with one Python and one torch. For some of them: nox -s "matrix-3.11(torch='2.13.0')" -- --ray 2.40.0"""
    session.run("python", "ci/matrix.py", "--torch", torch, *session.posargs)
