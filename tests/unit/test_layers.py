"""Allowed imports."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ray_fracbackend

_PACKAGE = Path(__file__).parents[2] / "ray_fracbackend"
# A part imports only itself and earlier parts. Only staged imports the ipc backend outside a function. ipc imports only shown.
_PARTS = (
    "staged",
    "shown",
    "errors",
    "timeouts",
    "log",
    "decide",
    "_torch",
    "_ray",
    "verify",
    "report",
    "worker",
    "checkpoints",
    "start",
    "config",
    "integrations",
    "cli",
)
# Parts of a folder, in the same order.
_ROOMS = {
    "ipc": ("errors", "knobs", "_torch", "host", "protocol", "device", "group"),
    "start": ("failure", "collect", "isolation", "backend"),
}
# Parts that need only the standard library, and parts that need torch but never Ray.
_PURE = ("shown", "errors", "timeouts", "log", "decide")
_WITHOUT_RAY = ("log", "_torch", "verify", "ipc", "staged")
# Modules of Python that exist only on Unix.
_UNIX = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
_MODULES = sorted(
    path for path in _PACKAGE.rglob("*.py") if path.parent != _PACKAGE or path.stem not in ("__init__", "__main__")
)


def part_of(path: Path) -> str:
    """Return the first name of a module below the package."""
    return path.relative_to(_PACKAGE).with_suffix("").parts[0]


def imported(path: Path, top_only: bool = False) -> set[str]:
    """Return the names of all modules that a file imports when it runs: anywhere in the file, or only at the top."""
    found = set()
    tree = ast.parse(path.read_text())
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in tree.body if top_only else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                folder = path.relative_to(_PACKAGE.parent).parts[: -node.level]
                module = ".".join([*folder, *([module] if module else [])])
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_imports_go_one_way(path):
    """The table above lists which part may import what; at the top none imports what Ray or Windows may lack, but for ipc, which needs Linux."""
    part, names = part_of(path), imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith("ray_fracbackend.")} - {"__version__"}
    if path.name == "demo.py":  # a script like those of users
        ours -= set(ray_fracbackend.__all__)
    if part in _ROOMS:
        room = path.relative_to(_PACKAGE / part).with_suffix("").parts[0]
        rooms = {name.split(".")[2] for name in names if name.startswith(f"ray_fracbackend.{part}.")} & {*_ROOMS[part]}
        assert room == "__init__" or rooms <= {*_ROOMS[part][: _ROOMS[part].index(room) + 1]}
    if part == "ipc":
        assert ours <= {"ipc", "shown"}
    else:
        at_the_top = imported(path, top_only=True)
        assert not [name for name in at_the_top if name.startswith("ray_fracbackend.ipc")] or part in ("cli", "staged")
        assert not at_the_top & _UNIX
        assert part != "_ray" or {name for name in at_the_top if name.split(".")[0] == "ray"} == {"ray", "ray.tune"}
        assert ours - {"ipc"} <= set(_PARTS[: _PARTS.index(part) + 1])
    foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"ray_fracbackend"}
    if part in _PURE:
        assert not foreign
    if part in _WITHOUT_RAY:
        assert "ray" not in foreign


def dotted_strings(path: Path) -> set[str]:
    """Return strings of a file that could be module names for importlib."""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {string for string in strings if re.fullmatch(r"\w+(\.\w+)+", string)}


def test_private_ray_names_live_in_one_module():
    """Only _ray.py imports private names of Ray, by statement or by import_module."""
    private = {
        (path.name, name)
        for path in _PACKAGE.rglob("*.py")
        for name in imported(path) | dotted_strings(path)
        if name.split(".")[0] == "ray" and any(part.startswith("_") for part in name.split("."))
    }
    assert {path for path, _ in private} == {"_ray.py"}


def test_without_ray():
    """The verification, its errors and the NCCL version can be used without Ray installed, or without importing it."""
    code = (
        "import sys; sys.modules['ray'] = None; from ray_fracbackend.worker.nccl_library import loaded_nccl_version; "
        "import ray_fracbackend.start.isolation.rank_tests, ray_fracbackend.cli; "
        "from ray_fracbackend import check_devices, verify_process_group, FracBackendError"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_names_are_attribute_errors():
    """The lazy package raises AttributeError for unknown names, like a module."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ray_fracbackend.nothing
    names = {name for name in dir(ray_fracbackend) if not name.startswith("__")}
    assert set(ray_fracbackend.__all__) <= names <= {*ray_fracbackend.__all__, "integrations", "ipc", "staged"}
