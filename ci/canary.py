"""Run the tests with the newest Ray or the newest torch; all other packages stay as in the tests.

    python3 ci/canary.py ray|torch [--pre] [PYTEST ARGUMENT ...]     in a temporary virtual environment, which is removed
    python3 ci/canary.py --record                                    after a manual check: record the names of this Ray as known

For Ray it also checks the private names that ray_fracbackend/_ray.py imports or uses against ci/ray_names.json, and the
patches of upstream/. Exit code: 0 if nothing changed and all tests pass; 1 if a name changed or is gone, a test failed,
a patch does not apply, or the release cannot be installed with the other packages; 2 if no package index could be
reached.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import CONSTRAINTS, ROOT, make_venv

KNOWN = ROOT / "ci" / "ray_names.json"
COMPAT = ROOT / "ray_fracbackend" / "_ray.py"
# Private methods and attributes that _ray.py uses on objects from Ray.
_V2_GROUPS = "ray.train.v2._internal.execution.worker_group"
REACHED = (
    "ray.train.torch.config:_TorchBackend.on_start",
    "ray.train.torch.config:_TorchBackend.on_shutdown",
    # Its fields: FracTorchConfig has them too.
    "ray.train.torch.config:TorchConfig",
    "ray.train._internal.worker_group:WorkerGroup.execute_single_async",
    "ray.train._internal.worker_group:WorkerGroup.get_resources_per_worker",
    "ray.train._internal.worker_group:WorkerMetadata",
    f"{_V2_GROUPS}.worker_group:WorkerGroup.abort",
    f"{_V2_GROUPS}.worker_group:WorkerGroup.get_resources_per_worker",
    f"{_V2_GROUPS}.state:WorkerGroupState.shutdown",
    f"{_V2_GROUPS}.execution_group:ExecutionGroup.execute_single_async",
    f"{_V2_GROUPS}.execution_group:ExecutionGroup.get_workers",
    f"{_V2_GROUPS}.worker:ActorMetadata",
)


def compat_names(source: str) -> Iterator[str]:
    """Find ``module:name`` of everything that a module imports from Ray, by statement or by ``_private``."""
    tree = ast.parse(source)
    owners = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            for alias in node.names:
                yield f"{node.module}:{alias.name}"
                owners[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and (module := private_module(node)):
            yield from (f"{module}:{ast.literal_eval(name)}" for name in node.args[1:])
        elif isinstance(node, ast.Assign) and (module := private_module(node.value)):
            owners |= {target.id: module for target in node.targets if isinstance(target, ast.Name)}
    # Private attributes that it reads from an imported module.
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            value = node.value
            owner = owners.get(value.id) if isinstance(value, ast.Name) else private_module(value)
            if owner:
                yield f"{owner}:{node.attr}"


def private_module(node: ast.AST) -> str | None:
    """Return the module that a call of _ray's ``_private`` imports, None for any other node."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_private"
    return ast.literal_eval(node.args[0]) if is_call else None


def names() -> list[str]:
    """Return all names to check, sorted."""
    return sorted({*compat_names(COMPAT.read_text()), *REACHED})


def describe(name: str) -> str | None:
    """Return kind and signature of a name in this interpreter's Ray, None if it is gone."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{part}")
    except (ImportError, AttributeError) as error:
        missing = getattr(error, "name", None) or ""
        # A missing extra of Ray does not mean that the name is gone.
        return None if missing.startswith("ray") or isinstance(error, AttributeError) else f"not installed: {missing}"
    if inspect.ismodule(found):
        return "module"
    if callable(found):
        return f"{'class' if inspect.isclass(found) else 'function'} {signature(found)}"
    return type(found).__name__


def signature(found: Any) -> str:
    """Return parameters and defaults, without annotations, whose text differs between Python versions."""
    full = inspect.signature(found)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in full.parameters.values()]
    text = str(full.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", text)


def described() -> dict[str, Any]:
    import ray

    return {"ray": ray.__version__, "names": {name: describe(name) for name in names()}}


def differences(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one line for each name that is gone, changed or new."""
    lines = []
    for name, now in found["names"].items():
        before = known["names"].get(name)
        if any((value or "").startswith("not installed") for value in (before, now)):
            continue
        if now is None:
            lines.append(f"VANISHED  {name}")
        elif name not in known["names"]:
            lines.append(f"UNKNOWN   {name}: {now} (look at it, then --record)")
        elif now != before:
            lines.append(f"CHANGED   {name}\n  {known['ray']}: {before}\n  {found['ray']}: {now}")
    return lines


def install_newest(package: str, python: Path, folder: Path, pre: bool) -> None:
    """Install the project and the newest release of a package, or exit: with 2 without an index, else with 1."""
    # Only this package is the newest one; all others are as in the tests.
    constraints = folder / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith(f"{package}==")))
    wanted = {"ray": "ray[train,rllib]", "torch": "torch"}[package]
    options = ["--quiet", "--upgrade", "--constraint", str(constraints), *(["--pre"] if pre else [])]
    command = [str(python), "-m", "pip", "install", *options, f"{ROOT}[test]", wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    print(done.stderr.strip()[-2000:], file=sys.stderr)
    if not has_releases(package, python):
        print("canary: NOTHING WAS CHECKED: no package index could be reached.")
        sys.exit(2)
    print(f"canary: the newest {package} cannot be installed beside the other packages of the tests, see above.")
    sys.exit(1)


def has_releases(package: str, python: Path) -> bool:
    """Return whether a package index answers, because pip's output of a failed installation is not always clear."""
    command = [str(python), "-m", "pip", "index", "versions", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def check(package: str, pre: bool, arguments: list[str]) -> int:
    """Test the newest release of a package; return the exit code."""
    # pip tries an unreachable index for minutes. The temporary environment is removed in any case.
    with tempfile.TemporaryDirectory(prefix="canary-", ignore_cleanup_errors=True) as folder:
        python = make_venv(Path(folder) / "venv")
        install_newest(package, python, Path(folder), pre)
        lines = names_that_differ(python) if package == "ray" else []
        if lines is None:
            return 1
        runs = {"tests": [python, "-m", "pytest", *arguments]}
        if package == "ray":
            runs["patches"] = [python, "upstream/check.py"]
        codes = {what: subprocess.run(command, cwd=ROOT, check=False).returncode for what, command in runs.items()}
        told = [f"{what} {f'ended with {code}' if code else 'pass'}" for what, code in codes.items()]
        print(f"canary: newest {package}: {', '.join([*([f'{len(lines)} names differ'] if lines else []), *told])}")
        return int(bool(lines) or any(codes.values()))


def names_that_differ(python: Path) -> list[str] | None:
    """Print and return the private names that differ; None if this Ray cannot be imported."""
    done = subprocess.run([python, __file__, "--describe"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{done.stderr.strip()[-2000:]}\ncanary: the newest Ray cannot be imported.")
        return None
    found, known = json.loads(done.stdout.splitlines()[-1]), json.loads(KNOWN.read_text())
    print(f"canary: Ray {found['ray']}, names as known of Ray {known['ray']}")
    lines = differences(known, found)
    print("\n".join(lines) or "all private names are as known", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", choices=("ray", "torch"), help="what is to be the newest")
    parser.add_argument("--pre", action="store_true", help="take pre-releases too")
    parser.add_argument("--record", action="store_true", help=f"write {KNOWN.name} from the Ray of this interpreter")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.describe:
        print(json.dumps(described()))
    elif options.record:
        KNOWN.write_text(json.dumps(described(), indent=2) + "\n")
    elif options.package is None:
        parser.error("name what is to be the newest: ray or torch")
    else:
        sys.exit(check(options.package, options.pre, arguments))


if __name__ == "__main__":
    main()
