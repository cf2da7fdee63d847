"""The table of docs/how-it-decides.md has every row of the decision, and the figure is drawn from it; its texts are not cut."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ray_fracbackend.decide.table import ROWS

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def test_page_and_picture() -> None:
    """Rows are in the order in which they are tried. After a change run ``python docs/figures/decision.py``."""
    spec = importlib.util.spec_from_file_location("decision_figure", _FIGURES / "decision.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert [name for name, _, _ in figure.CASES] == ["left to Ray", *(row.name for row in ROWS)]
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()


@pytest.mark.parametrize("name", ["decision.svg", "start_overview.svg"])
def test_texts_fit(name) -> None:
    """Each text ends inside the picture and inside its box, in Helvetica, whose widths Arial and Liberation Sans have."""
    matplotlib = pytest.importorskip("matplotlib", reason="it has the widths of Helvetica")
    fonts, widths = Path(matplotlib.get_data_path(), "fonts", "pdfcorefonts"), {}
    for weight in ("normal", "bold"):
        metrics = (fonts / f"Helvetica{'-Bold' * (weight == 'bold')}.afm").read_text()
        widths[weight] = {
            int(code): int(width) for code, width in re.findall(r"^C (\d+) ; WX (\d+)", metrics, re.MULTILINE)
        }
    root = ElementTree.parse(_FIGURES / name).getroot()
    boxes = [[float(box.get(key, 0)) for key in ("x", "y", "width", "height")] for box in root.iterfind("{*}rect")]
    cut = []
    for text in root.iterfind("{*}text"):
        of, size = widths[text.get("font-weight", "normal")], float(text.get("font-size")) / 1000
        x, y, width = float(text.get("x")), float(text.get("y")), size * sum(of[ord(each)] for each in text.text)
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        right = min(bx + bw for bx, by, bw, bh in boxes if bx <= x <= bx + bw and by <= y <= by + bh)
        cut += [text.text] if left < 0 or left + width > right else []
    assert cut == []
