"""Who may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "ray_fracbackend"
_PURE = (
    "errors",
    "facts",
    "options",
    "sharing",
    "hints",
    "start_plan",
    "shared_plan",
    "plan",
    "interfaces",
    "rendezvous",
    "environment",
)


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", _PURE)
def test_planning_needs_the_standard_library_alone(name):
    """The decision can be run and tested with neither torch nor Ray."""
    foreign = {m.split(".")[0] for m in imported(_PACKAGE / f"{name}.py")} - sys.stdlib_module_names
    assert foreign <= {"ray_fracbackend"}


def test_private_ray_names_live_in_one_module():
    """Everything of Ray that may change without notice is imported in ray_compat.py alone."""
    private = {
        (path.name, name)
        for path in _PACKAGE.rglob("*.py")
        for name in imported(path)
        if name.split(".")[0] == "ray" and any(part.startswith("_") for part in name.split("."))
    }
    assert {path for path, _ in private} == {"ray_compat.py"}


@pytest.mark.parametrize("path", sorted((_PACKAGE / "ipc").glob("*.py")), ids=lambda path: path.stem)
def test_ipc_knows_nothing_of_ray(path):
    """The ipc backend needs the standard library and torch alone, and nothing of the rest of the package."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    foreign = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    assert {module.split(".")[0] for module in foreign} <= {"torch", "mpi4py", "ray_fracbackend"}
    assert all(module.startswith("ray_fracbackend.ipc") for module in foreign if module.startswith("ray_fracbackend"))


def test_verification_works_without_ray():
    """verify_process_group and the errors can be used where Ray is not installed."""
    code = "import sys; sys.modules['ray'] = None; from ray_fracbackend import verify_process_group, FracBackendError"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_names_are_attribute_errors():
    """The lazy package behaves like a module for names that it does not have."""
    import ray_fracbackend

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ray_fracbackend.nothing
    assert set(ray_fracbackend.__all__) <= set(dir(ray_fracbackend))
