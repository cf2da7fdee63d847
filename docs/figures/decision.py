"""Draw decision.svg from the table of docs/how-it-decides.md.

usage: python docs/figures/decision.py
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("decision.svg")
PAGE = Path(__file__).parents[1] / "how-it-decides.md"
# Name, case and result of each row, in the order in which they are asked.
CASES = re.findall(r"^\| \d+ \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
# By what the result names.
_COLORS = {"Error": "#b3392f", "gloo": "#2f6db3", "staged": "#1f7a8c", "ipc": "#6a4fa3", "nccl": "#2e7d4f"}
_INK, _LINE, _GRAY = "#24292f", "#b8bec5", "#5c6570"
_WIDTH, _LEFT, _LEFT_WIDTH, _RIGHT, _HEIGHT, _GAP, _LINE_HEIGHT = 960, 16, 560, 640, 30, 17, 17
# Characters of a case in one line of its box.
_LINE_CHARS = 78


def svg() -> str:
    """The picture as one SVG document."""
    body: list[str] = []
    top = _GAP
    for number, (_, case, result) in enumerate(CASES, 1):
        lines = _wrapped(_plain(case))
        height = _HEIGHT + _LINE_HEIGHT * (len(lines) - 1)
        body += _case(lines, top, height, is_last=number == len(CASES))
        body += _result(number, result, top + height / 2)
        top += height + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
            'role="img" font-family="Helvetica, Arial, sans-serif">',
            "<title>How a start decides on its backend</title>",
            f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > _LINE_CHARS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _case(lines: list[str], top: float, height: float, is_last: bool) -> list[str]:
    """The box on the left, its line to the right, and its line down to the next."""
    middle, end, down = top + height / 2, _LEFT + _LEFT_WIDTH, _LEFT + 24
    drawn = [
        f'<rect x="{_LEFT}" y="{top}" width="{_LEFT_WIDTH}" height="{height}" rx="4" fill="#f6f8fa" stroke="{_LINE}"/>',
        f'<path d="M{end} {middle:g}H{_RIGHT - 8}" stroke="{_LINE}"/>',
    ]
    for index, line in enumerate(lines):
        drawn.append(_text(line, _LEFT + 12, middle + 4.5 + (index - (len(lines) - 1) / 2) * _LINE_HEIGHT))
    if not is_last:
        drawn.append(_text("yes", end + 20, middle - 4, _GRAY))
        drawn.append(f'<path d="M{down} {top + height}v{_GAP}" stroke="{_LINE}"/>')
        drawn.append(_text("no", down + 5, top + height + _GAP - 4, _GRAY))
    return drawn


def _result(number: int, text: str, middle: float) -> list[str]:
    """The result on the right: the row's number and the result."""
    result = _plain(text).partition(". ")[0]
    color = next((color for word, color in _COLORS.items() if word in result), _INK)
    return [
        f'<rect x="{_RIGHT}" y="{middle - 10:g}" width="26" height="20" rx="10" fill="{color}"/>',
        _text(str(number), _RIGHT + 13, middle + 4.5, "#ffffff", anchor="middle"),
        _text(result, _RIGHT + 36, middle + 4.5, color),
    ]


def _text(text: str, x: float, y: float, color: str = _INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="13">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
