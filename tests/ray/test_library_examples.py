"""The examples of training libraries, as a user runs them; each library's own test compares their weights."""

import re

import pytest

from tests.ray.conftest import run_example


@pytest.mark.full
@pytest.mark.parametrize("name", ["lightning_mnist_like.py", "transformers_trainer.py"])
def test_example(name, tmp_path):
    """The script succeeds, learns its data, and writes its results to the given folder."""
    done = run_example(name, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"^loss (\S+) after", done.stdout, re.MULTILINE)[1]) < 1.0
    assert list(tmp_path.glob("*/start_report.json"))
