"""Draws decision.svg, the decision of docs/how-it-decides.md as a picture. usage: python docs/figures/decision.py

The steps below are held to that table and to plan_start() by tests/project/test_decision_figure.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

TARGET = Path(__file__).with_name("decision.svg")


@dataclass(frozen=True)
class Outcome:
    """What a step ends in.

    Attributes:
        row: Row of the table in docs/how-it-decides.md.
        text: The result in words.
        results: Every result that it can have: ``ray``, ``error`` or a backend. The first one gives the color.
        case: Which of several cases of one step; empty where there is one.
    """

    row: int
    text: str
    results: tuple[str, ...]
    case: str = ""


@dataclass(frozen=True)
class Step:
    """A question, asked in order, and what "yes" ends in."""

    question: str
    outcomes: tuple[Outcome, ...]


STEPS = (
    Step(
        "Backend of another name; TPU, HPU, NPU ...?",
        (Outcome(2, "Ray's own start, untouched", ("ray",)),),
    ),
    Step("Windows and other systems in one job?", (Outcome(5, "error: Gloo cannot connect them", ("error",)),)),
    Step("No GPU asked for?", (Outcome(1, "gloo", ("gloo",)),)),
    Step(
        "Ray gave GPUs, torch of some worker has none?",
        (Outcome(3, 'error with the cause; on_missing_cuda="cpu": gloo on the CPU', ("error", "gloo")),),
    ),
    Step("Compute mode forbids it?", (Outcome(12, "error: which mode, how to change it", ("error",)),)),
    Step(
        "Ranks share a device,\nor NCCL would refuse them?",
        (
            Outcome(6, "error with the share map", ("error",), 'on_shared_device="error"'),
            Outcome(7, "gloo", ("gloo",), '"gloo"'),
            Outcome(8, "nccl, multi-rank flags; error below 2.30", ("nccl", "error"), '"nccl"; NCCL\'s own switch'),
            Outcome(9, "ipc; error where it cannot run", ("ipc", "error"), '"ipc"'),
            Outcome(10, "gloo, with a warning", ("gloo",), '"auto", the default'),
            Outcome(11, "as above; not nccl: a warning", ("gloo", "nccl", "ipc", "error"), 'with backend="nccl"'),
        ),
    ),
    Step("torch of some worker without NCCL?", (Outcome(5, "gloo", ("gloo",)),)),
    Step("Different NCCL versions?", (Outcome(5, "error that lists them", ("error",)),)),
    Step("None of these", (Outcome(4, "nccl, environment as in stock Ray", ("nccl",)),)),
)

_COLORS = {"ray": "#8a8a8a", "error": "#b3392f", "gloo": "#2f6db3", "ipc": "#6a4fa3", "nccl": "#2e7d4f"}
_INK, _LINE = "#24292f", "#b8bec5"
_WIDTH, _LEFT, _LEFT_WIDTH, _RIGHT, _LINE_HEIGHT, _GAP = 930, 16, 336, 400, 26, 12
_CASE_WIDTH = 188


def svg() -> str:
    """The picture as one SVG document."""
    body: list[str] = []
    top = _GAP
    for number, step in enumerate(STEPS):
        height = _LINE_HEIGHT * len(step.outcomes) + 6
        body += _question(step.question, top, height, is_last=number == len(STEPS) - 1)
        for index, outcome in enumerate(step.outcomes):
            body += _outcome(outcome, top + 3 + index * _LINE_HEIGHT)
        top += height + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
            'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            "<title>How a start decides on its backend</title>",
            f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _question(text: str, top: int, height: int, is_last: bool) -> list[str]:
    """The box on the left, its way to the right, and its way down to the next."""
    middle, end, down = top + height / 2, _LEFT + _LEFT_WIDTH, _LEFT + 24
    drawn = [
        f'<rect x="{_LEFT}" y="{top}" width="{_LEFT_WIDTH}" height="{height}" rx="4" fill="#f6f8fa" stroke="{_LINE}"/>',
        f'<path d="M{end} {middle:g}H{_RIGHT - 8}" stroke="{_LINE}"/>',
    ]
    lines = text.split("\n")
    for index, line in enumerate(lines):
        drawn.append(_text(line, _LEFT + 12, middle + 4.5 + (index - (len(lines) - 1) / 2) * 18))
    if not is_last:
        drawn.append(_text("yes", end + 10, middle - 4, _COLORS["ray"], size=11))
        drawn.append(f'<path d="M{down} {top + height}v{_GAP}" stroke="{_LINE}"/>')
        drawn.append(_text("no", down + 5, top + height + _GAP - 2, _COLORS["ray"], size=11))
    return drawn


def _outcome(outcome: Outcome, top: int) -> list[str]:
    """One result on the right: the row's number, the case, the result."""
    middle, x = top + _LINE_HEIGHT / 2, _RIGHT + 36
    # With more than a result and an error, the row follows the others.
    color = _COLORS[outcome.results[0]] if len(outcome.results) <= 2 else _INK
    drawn = [
        f'<rect x="{_RIGHT}" y="{top + 3}" width="26" height="{_LINE_HEIGHT - 6}" rx="10" fill="{color}"/>',
        _text(str(outcome.row), _RIGHT + 13, middle + 4.5, "#ffffff", anchor="middle"),
    ]
    if outcome.case:
        drawn.append(_text(outcome.case, x, middle + 4.5))
        x += _CASE_WIDTH
    return [*drawn, _text(outcome.text, x, middle + 4.5, color)]


def _text(text: str, x: float, y: float, color: str = _INK, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
