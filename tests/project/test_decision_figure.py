"""The table of docs/how-it-decides.md has every row of the decision, and the figure is drawn from it."""

import importlib.util
from pathlib import Path

from ray_fracbackend.decide.table import ROWS

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def test_page_and_picture() -> None:
    """Rows are in the order in which they are tried. After a change run ``python docs/figures/decision.py``."""
    spec = importlib.util.spec_from_file_location("decision_figure", _FIGURES / "decision.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert [name for name, _, _ in figure.CASES] == ["left to Ray", *(row.name for row in ROWS)]
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()
