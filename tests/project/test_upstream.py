"""What upstream/check.py does not test itself: the tests that it names, and the page about the patches."""

import importlib.util
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    """Import upstream/check.py as a module."""
    spec = importlib.util.spec_from_file_location("upstream_check", _ROOT / "upstream" / "check.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_our_own_tests_on_a_patched_ray_are_there(check):
    """For one wrong name check.py would run none of them, and report it after half an hour."""
    assert [name for name in check.PACKAGE_TESTS if not (_ROOT / "tests" / "ray" / name).is_file()] == []


def test_the_page_has_every_patch(check):
    """docs/development/upstream.md has a cover letter for each patch, with its size and its reproductions."""
    if version("ray") != check.RAY:
        pytest.skip(f"needs Ray {check.RAY}, for which the patches are made")
    patches = [check.Patch(path) for path in sorted((_ROOT / "upstream" / "patches").glob("*.patch"))]
    page = (_ROOT / "docs" / "development" / "upstream.md").read_text()
    sizes = re.findall(r"^\| (\d+) \| .* \| (\d+) \| [^|]+ \|$", page, re.MULTILINE)
    assert sizes == [(str(number), str(patch.num_changed_lines)) for number, patch in enumerate(patches, 1)]
    for number, patch in enumerate(patches, 1):
        subject = re.search(r"^Subject: \[PATCH\] \[Train\] (.+)$", patch.path.read_text(), re.MULTILINE)[1]
        letter = page.partition(f"\n## {number}. {subject}\n")[2].partition("\n## ")[0]
        for test in patch.reproductions:
            assert f"::{re.split('::|[[]', test)[1]}`" in letter
