"""Tries the newest Ray: what became of the private names that we use, and whether the suite and the patches of upstream/ pass on it.

    python3 ci/canary.py [--pre] [PYTEST ARGUMENT ...]     in a temporary virtual environment, which is removed
    python3 ci/canary.py --record                          after a check by hand: take this Ray's names as the known ones

The names are those that ray_fracbackend/_ray.py imports or reaches; what is known of them is in ci/ray_names.json. Ends with 0
when all is as known and the suite and the patches pass, 1 when a name changed or vanished, a test failed or a patch does not
apply, 2 when nothing could be checked, as without a network.
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
# Private methods and attributes that _ray.py reaches through objects that Ray hands over.
_V2_GROUPS = "ray.train.v2._internal.execution.worker_group"
REACHED = (
    "ray.train.torch.config:_TorchBackend.on_start",
    "ray.train.torch.config:_TorchBackend.on_shutdown",
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
NETWORK_TROUBLE = re.compile(
    r"NewConnectionError|Failed to establish|Name or service not known|Temporary failure in name resolution|"
    r"Could not find a version|No matching distribution|Network is unreachable|timed out",
    re.IGNORECASE,
)


def compat_names(source: str) -> Iterator[str]:
    """Find ``module:name`` of everything a module imports from Ray, by statement or by ``_private``, anywhere in it."""
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
    # And the private attributes it takes from an imported module.
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
    """All names to look at, sorted."""
    return sorted({*compat_names(COMPAT.read_text()), *REACHED})


def describe(name: str) -> str | None:
    """Kind and signature of a name in this interpreter's Ray, None where it is gone."""
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
        # An extra of Ray that is not installed says nothing about the name.
        return None if missing.startswith("ray") or isinstance(error, AttributeError) else f"not installed: {missing}"
    if inspect.ismodule(found):
        return "module"
    if callable(found):
        return f"{'class' if inspect.isclass(found) else 'function'} {signature(found)}"
    return type(found).__name__


def signature(found: Any) -> str:
    """Parameters and defaults; without annotations, whose text differs between versions of Python."""
    full = inspect.signature(found)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in full.parameters.values()]
    text = str(full.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", text)


def described() -> dict[str, Any]:
    import ray

    return {"ray": ray.__version__, "names": {name: describe(name) for name in names()}}


def differences(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each name that is gone, changed or not known yet."""
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


def install_newest(python: Path, folder: Path, pre: bool) -> None:
    """Installs the project and the newest Ray, or ends the script with 2 and the reason."""
    # Ray is what is to be new; all else is as in the tests.
    constraints = folder / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith("ray==")))
    options = ["--constraint", str(constraints), *(["--pre"] if pre else [])]
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        *options,
        f"{ROOT}[test]",
        "ray[train,rllib]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    print(done.stderr.strip()[-2000:], file=sys.stderr)
    offline = "no package index could be reached, or it has no Ray for this Python"
    why = offline if NETWORK_TROUBLE.search(done.stderr) else "the newest Ray could not be installed"
    print(f"canary: NOTHING WAS CHECKED: {why}.")
    sys.exit(2)


def check(pre: bool, arguments: list[str]) -> int:
    # pip tries an unreachable index for minutes; its virtual environment is gone afterwards in any case.
    with tempfile.TemporaryDirectory(prefix="ray-canary-", ignore_cleanup_errors=True) as folder:
        python = make_venv(Path(folder) / "venv")
        install_newest(python, Path(folder), pre)
        done = subprocess.run([python, __file__, "--describe"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{done.stderr.strip()[-2000:]}\ncanary: the newest Ray cannot be imported.")
            return 1
        found, known = json.loads(done.stdout.splitlines()[-1]), json.loads(KNOWN.read_text())
        print(f"canary: Ray {found['ray']}, names as known of Ray {known['ray']}")
        lines = differences(known, found)
        print("\n".join(lines) or "all private names are as known", flush=True)
        suite = subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
        patches = subprocess.run([python, "upstream/check.py"], cwd=ROOT, check=False).returncode
        told = (
            f"{what} {'pass' if code == 0 else f'ended with {code}'}"
            for what, code in (("tests", suite), ("patches", patches))
        )
        print(f"canary: {len(lines)} names differ, {', '.join(told)}")
        return int(bool(lines) or suite != 0 or patches != 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pre", action="store_true", help="take pre-releases too")
    parser.add_argument("--record", action="store_true", help=f"write {KNOWN.name} from the Ray of this interpreter")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.describe:
        print(json.dumps(described()))
    elif options.record:
        KNOWN.write_text(json.dumps(described(), indent=2) + "\n")
    else:
        sys.exit(check(options.pre, arguments))


if __name__ == "__main__":
    main()
