"""The script of docs/quickstart.md, as a user runs it, and the output that the page shows."""

import re
from pathlib import Path

import pytest
import torch

from ray_fracbackend._ray import v2_enabled
from tests.ray.conftest import run_example

_PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def pattern(line):
    """A line of the page, in which numbers may differ and ``...`` stands for any text, without Ray's prefix of a process."""
    text = re.escape(re.sub(r"^\(\w+ pid=\d+\) ", "", line)).replace(r"\.\.\.", ".*")
    return re.sub(r"\d+", r"\\d+", text)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the output of the page is that of a machine without a GPU")
@pytest.mark.skipif(not v2_enabled(), reason="the output of the page is that of the V2 engine")
def test_output_of_the_quickstart(tmp_path, monkeypatch):
    """The script ends well and prints every line of the page."""
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run_example("quickstart.py")
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    (shown,) = re.findall(r"```text\n(.+?)```", _PAGE.read_text(), flags=re.DOTALL)
    assert [line for line in shown.splitlines() if not re.search(pattern(line), printed)] == []
    assert list(tmp_path.rglob("start_report.json"))
