"""The table of docs/how-it-decides.md has every row of the decision, and the figure is drawn from it."""

import importlib.util
from pathlib import Path

from ray_fracbackend.decide.table import ROWS

_DOCS = Path(__file__).parents[2] / "docs"


def load_figure():
    spec = importlib.util.spec_from_file_location("decision_figure", _DOCS / "figures" / "decision.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_row():
    """In the order in which they are tried; the first one is decided before the workers are called."""
    assert [name for name, _, _ in load_figure().CASES] == ["left to Ray", *(row.name for row in ROWS)]


def test_the_picture_is_that_of_the_page():
    """Run ``python docs/figures/decision.py``."""
    figure = load_figure()
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()
