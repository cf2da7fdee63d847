"""Run the Windows builds of CPython, torch and Ray under Wine, with what ci/windows.py runs on Windows. Needs Debian 12 on x86-64, and root.

usage: python3 ci/wine.py [--record] [--strict] [--versions TORCH RAY] [STEP ...]     set up what is missing, then run ci/windows.py, or
                                                                       some of its steps, with each of CELLS, the strict one, or one pair
       python3 ci/wine.py [--strict] [--versions TORCH RAY] --python -- ARGUMENT ...   set up, then Windows' python.exe with these arguments

Uses the package sources that apt and pip are set up with. What it sets up is kept in --folder, 5 GB outside of the project, and used
again. --record writes what each step came to into the line of its versions in ci/wine_results.jsonl, and the table of docs/development/windows-runs.md.

Wine is not Windows. A failure may be Wine's fault. A success is evidence for the Windows builds of Python, torch, Ray and this package,
not for Windows' own network stack, resolver and files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT
from wine_setup import Wine, why_not
from wine_strict import StrictWine

RESULTS = ROOT / "ci" / "wine_results.jsonl"
PAGE = ROOT / "docs" / "development" / "windows-runs.md"
_BEGIN, _END = "<!-- table: ci/wine.py --record -->\n", "<!-- end of the table -->"
# torch above, below and among those without a Gloo transport, and one without staged; a Ray without V2. The first pair runs all steps.
_PAIRS = (("2.13.0", "2.60.0"), ("2.7.1", "2.51.1"), ("2.9.1", "2.60.0"), ("2.6.0", "2.40.0"))
CELLS = (*((torch, ray, False) for torch, ray in _PAIRS), (*_PAIRS[0], True))
# Steps for the older torch and Ray, whose results may differ.
_OLDER = {"2.7.1": ["imports", "verify", "facts", "example"]}
_WORDS = {"passed": "passed", "failed": "failed", "linux": "marked `linux`", "skipped": "skipped"}
_VARIABLES = {
    # Engine and timeouts for a machine that is slower than Windows.
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
    # Wine lacks the memory performance counters that Ray's monitor reads.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "disabled",
}


def copy_project(folder: Path) -> None:
    """Copy the work tree without the files that git ignores, replacing an earlier copy."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in os.fsdecode(listed).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def run_cell(wine: Wine, torch: str, ray: str, steps: list[str]) -> dict[str, Any]:
    """Run the steps with one torch and one Ray; return the results of ci/windows.py."""
    strict = isinstance(wine, StrictWine)
    print(f"\n##### {title(torch, ray, strict)}, Wine {wine.version()} ({datetime.datetime.now():%F %T})", flush=True)
    results = wine.folder / "results.json"
    results.unlink(missing_ok=True)
    command = [r"W:\project\ci\windows.py", "--results", r"W:\results.json", *steps]
    try:
        code = wine.python(command, torch, ray, _VARIABLES)
    finally:
        wine.end()
    found = json.loads(results.read_text()) if results.exists() else {}
    where = {"date": datetime.date.today().isoformat(), "wine": wine.version(), "cores": os.cpu_count()}
    return {"torch": torch, "ray": ray, "strict": strict, **where, "exit_code": code, **found}


def read() -> list[dict[str, Any]]:
    """Return the records in the order of CELLS."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = {key_of(cell): cell for cell in map(json.loads, lines)}
    return [found[key] for key in CELLS if key in found]


def key_of(cell: dict[str, Any]) -> tuple[str, str, bool]:
    """Return the identity of a line."""
    return cell["torch"].partition("+")[0], cell["ray"], cell.get("strict", False)


def record(cells: list[dict[str, Any]]) -> None:
    """Replace earlier lines of these cells, step by step, and update the table of the page."""
    known = {key_of(cell): cell for cell in read()}
    for cell in cells:
        earlier = known.get(key_of(cell), {})
        both = {name: {**earlier.get(name, {}), **cell.get(name, {})} for name in ("steps", "tests")}
        known[key_of(cell)] = {**cell, **both}
    RESULTS.write_text("".join(f"{json.dumps(known[key])}\n" for key in CELLS if key in known))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}{table(read())}\n{_END}{after}", encoding="utf-8")


def table(cells: list[dict[str, Any]]) -> str:
    """Return the tests by folder and the steps, with a column for each cell."""
    lines = [_row("", [title(*key_of(cell)) for cell in cells]), "|" + "---|" * (len(cells) + 1)]
    folders = dict.fromkeys(folder for cell in cells for folder in cell["tests"])
    lines += [_row(f"`{folder}`", [_counts(cell["tests"].get(folder)) for cell in cells]) for folder in folders]
    steps = dict.fromkeys(step for cell in cells for step in cell["steps"])
    lines += [_row(f"step `{step}`", [_step(cell["steps"].get(step)) for cell in cells]) for step in steps]
    lines.append(
        _row("latest step run on", [f"{cell['date']}, Wine {cell['wine']}, {cell['cores']} cores" for cell in cells])
    )
    return "\n".join(lines)


def title(torch: str, ray: str, strict: bool) -> str:
    """Return the name of a cell."""
    return f"torch {torch}, Ray {ray}{', strict' * strict}"


def _row(first: str, others: list[str]) -> str:
    return f"| {first} | {' | '.join(others)} |"


def _counts(tests: dict[str, int] | None) -> str:
    if tests is None:
        return "-"
    shown = [f"{tests[name]} {word}" for name, word in _WORDS.items() if tests[name]]
    return ", ".join(shown)


def _step(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['result']}, {found['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--folder", type=Path, default=cache / "ray_fracbackend-wine", help="default: %(default)s")
    parser.add_argument("--versions", nargs=2, metavar=("TORCH", "RAY"), help="instead of each pair of CELLS")
    parser.add_argument("--strict", action="store_true", help="as on a person's laptop: ci/wine_strict.py")
    parser.add_argument("--record", action="store_true", help="write what was seen")
    parser.add_argument("--python", action="store_true", help="run Windows' python.exe with the rest of the line")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="of ci/windows.py; default: all")
    options = parser.parse_args()
    if reason := why_not():
        print(f"ci/wine.py: not run: {reason}", file=sys.stderr)
        raise SystemExit(2)
    chosen = [cell for cell in CELLS if cell[2] or not options.strict]
    cells = [(*options.versions, options.strict)] if options.versions else chosen
    started = time.monotonic()
    wines = {strict: (StrictWine if strict else Wine)(options.folder.absolute()) for _, _, strict in cells}
    for wine in wines.values():
        wine.set_up({torch for torch, _, _ in cells}, {ray for _, ray, _ in cells})
    copy_project(wine.folder / "project")
    print(f"set up in {time.monotonic() - started:.0f} s, {wine.disk_gb():.1f} GB", flush=True)
    if options.python:
        raise SystemExit(wines[cells[0][2]].python(options.steps, *cells[0][:2], _VARIABLES))
    found = [run_cell(wines[cell[2]], *cell[:2], options.steps or _OLDER.get(cell[0], [])) for cell in cells]
    if options.record:
        record(found)
    print(f"\nall in {time.monotonic() - started:.0f} s", flush=True)
    if any(cell["exit_code"] for cell in found):
        raise SystemExit("a step failed under Wine, see above")


if __name__ == "__main__":
    main()
