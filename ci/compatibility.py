"""Writes the table of docs/compatibility.md from ci/matrix_results.jsonl. usage: python3 ci/compatibility.py"""

from __future__ import annotations

from typing import Any

import matrix
from common import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
_BEGIN, _END = "<!-- table: ci/compatibility.py -->\n", "<!-- end of the table -->"


def table(cells: list[dict[str, Any]]) -> str:
    """Return one row per Python and torch with one column per Ray, then the failures and the missing runs."""
    found = {matrix.key_of(cell): cell for cell in cells}
    notes: list[str] = []
    idle: list[str] = []
    rows = ["Python", "torch", "CUDA, NCCL in it", *(f"Ray {ray}" for ray in matrix.RAYS)]
    lines = [_line(rows), "|" + "---|" * len(rows)]
    for python in matrix.PYTHONS:
        for torch in matrix.TORCHES:
            row = [found.get((python, torch, ray)) for ray in matrix.RAYS]
            if not any(row):
                idle.append(f"Python {python} with torch {torch}")
                continue
            shown = [_shown(cell, notes) for cell in row]
            lines.append(_line([python, *_build(torch, row), *shown]))
    dates = sorted({cell["date"] for cell in cells})
    systems = sorted({cell["system"] for cell in cells})
    if dates:
        lines += ["", f"Run on {', '.join(systems)}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}."]
    if idle:
        lines += ["", f"Not run: {'; '.join(idle)}."]
    return "\n".join([*lines, *([""] if notes else []), *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def _line(columns: list[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def _build(torch: str, row: list[dict[str, Any] | None]) -> tuple[str, str]:
    """Return the torch that was installed, or that should be installed, and its build features."""
    installed = next((cell for cell in row if cell and "v1" in cell), None)
    if installed is None:
        return torch, "-"
    built_in = f"CUDA {installed['cuda']}, NCCL {installed['nccl']}" if installed["cuda"] else "neither"
    return installed["torch"], built_in


def _shown(cell: dict[str, Any] | None, notes: list[str]) -> str:
    if cell is None:
        return "not run"
    if cell["result"] == "not installable":
        return "no wheel" if cell["reason"].startswith("no wheel") else _noted("not installable", cell["reason"], notes)
    if cell["result"] == "failed":
        words = "; ".join(f"{engine.upper()} {cell[engine]}" for engine in ("v1", "v2") if engine in cell)
        return _noted("failed", words, notes)
    return ", ".join(engine.upper() for engine in ("v1", "v2") if engine in cell)


def _noted(word: str, reason: str, notes: list[str]) -> str:
    if reason not in notes:
        notes.append(reason)
    return f"{word} ({notes.index(reason) + 1})"


def page(text: str, cells: list[dict[str, Any]]) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table(cells)}\n\n{_END}{after}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), matrix.read()))


if __name__ == "__main__":
    main()
