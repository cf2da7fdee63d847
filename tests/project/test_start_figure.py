"""The picture of docs/concepts.md is the one that its script draws."""

import importlib.util
import sys
from pathlib import Path

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def load_figure():
    spec = importlib.util.spec_from_file_location("start_overview_figure", _FIGURES / "start_overview.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figure = load_figure()


def test_the_picture_is_up_to_date():
    """If not, run ``python docs/figures/start_overview.py``."""
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()


def test_the_page_has_every_step_under_its_number():
    """docs/concepts.md lists the steps of the picture, in its order and with its names."""
    page = (_FIGURES.parent / "concepts.md").read_text(encoding="utf-8")
    steps = [
        f"| {step.number}. {step.title} | {'driver' if step.in_driver else 'every worker'}"
        for step in figure.STEPS
        if step.number
    ]
    places = [page.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
