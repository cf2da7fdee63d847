"""Draw start_overview.svg: the steps of a start, in the driver and in two workers that share a GPU.

usage: python docs/figures/start_overview.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("start_overview.svg")

# Narrow, so that the text can be read on a phone.
_WIDTH, _MARGIN, _COLUMN, _TOP, _ROW, _BOX = 480, 14, 196, 66, 86, 60
_RIGHT = _WIDTH - _MARGIN - _COLUMN
_INK, _GRAY, _LINE, _FILL = "#24292f", "#57606a", "#8c959f", "#f6f8fa"
_BLUE, _GREEN = "#2f6db3", "#2e7d4f"


@dataclass(frozen=True)
class Step:
    """One step of a start.

    Args:
        number: Its number in the text of docs/concepts.md; 0 for what comes after the start.
        title: Its name.
        text: What happens.
        in_driver: Whether it runs in the driver or controller, else in every worker.
        arrow: What goes to the other side afterwards.
    """

    number: int
    title: str
    text: str
    in_driver: bool
    arrow: str = ""


STEPS = (
    Step(1, "Probe", "devices, NCCL, network", in_driver=False, arrow="reports"),
    Step(2, "Plan", "one backend, with a reason", in_driver=True, arrow="instructions"),
    Step(3, "Connect", "join the process group", in_driver=False),
    Step(4, "Verify", "collectives, known results", in_driver=False, arrow="figures"),
    Step(5, "Report", "log, start_report.json", in_driver=True, arrow="begin"),
    Step(0, "Train function", "your code", in_driver=False),
)


def svg() -> str:
    """Return the picture as one SVG document."""
    height = _TOP + _ROW * (len(STEPS) - 1) + _BOX + _MARGIN
    body = [
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text("Driver or controller", _MARGIN + _COLUMN / 2, 28, weight="bold", anchor="middle"),
        _text("Workers", _RIGHT + _COLUMN / 2, 28, weight="bold", anchor="middle"),
        _text("FracTorchConfig", _MARGIN + _COLUMN / 2, 48, _GRAY, anchor="middle", size=13),
        _text("ranks 0 and 1, on one GPU", _RIGHT + _COLUMN / 2, 48, _GRAY, anchor="middle", size=13),
    ]
    for index, step in enumerate(STEPS):
        top = _TOP + _ROW * index
        body += _box(step, top)
        if index + 1 < len(STEPS):
            body += _connection(step, STEPS[index + 1], top)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
            'role="img" font-family="Helvetica, Arial, sans-serif" font-size="15">',
            "<title>The steps of a start: probe, plan, connect, verify, report</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{_LINE}"/></marker></defs>',
            *body,
            "</svg>",
            "",
        ]
    )


def _box(step: Step, top: float) -> list[str]:
    left = _MARGIN if step.in_driver else _RIGHT
    color = _BLUE if step.number else _GREEN
    drawn = [
        f'<rect x="{left}" y="{top}" width="{_COLUMN}" height="{_BOX}" rx="4" fill="{_FILL}" stroke="{color}"/>',
        _text(step.title, left + (42 if step.number else 12), top + 26, color, weight="bold"),
        _text(step.text, left + 12, top + 48, size=14),
    ]
    if step.number:
        drawn.append(f'<circle cx="{left + 23}" cy="{top + 21}" r="11" fill="{color}"/>')
        drawn.append(_text(str(step.number), left + 23, top + 26, "#ffffff", anchor="middle", size=14))
    return drawn


def _connection(step: Step, following: Step, top: float) -> list[str]:
    """Draw the arrow to the next step: down in one column, or to the side and down with a label."""
    end = top + _ROW - 2
    if step.in_driver == following.in_driver:
        return [_arrow(f"M{_middle(step):g} {top + _BOX}V{end:g}")]
    side = _MARGIN + _COLUMN if step.in_driver else _RIGHT
    other = _middle(following)
    return [
        _arrow(f"M{side} {top + _BOX / 2:g}H{other:g}V{end:g}"),
        _text(step.arrow, other, top + _BOX / 2 - 7, _GRAY, anchor="middle", size=13),
    ]


def _middle(step: Step) -> float:
    return (_MARGIN if step.in_driver else _RIGHT) + _COLUMN / 2


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'


def _text(
    text: str, x: float, y: float, color: str = _INK, anchor: str = "start", size: int = 15, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
