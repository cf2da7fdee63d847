"""The patches for Ray apply, and errors state the problem of a patch. upstream/check.py runs their own tests."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    """Import upstream/check.py as a module."""
    spec = importlib.util.spec_from_file_location("upstream_check", _ROOT / "upstream" / "check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def patches(check):
    if version("ray") != check.RAY:
        pytest.skip(f"needs Ray {check.RAY}, for which the patches are made")
    return [check.Patch(path) for path in sorted((_ROOT / "upstream" / "patches").glob("*.patch"))]


@pytest.mark.full
def test_the_patches_apply(patches):
    """Each patch applies by itself and with all others, within its size and in Ray's style."""
    command = [sys.executable, str(_ROOT / "upstream" / "check.py"), "--apply"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for patch in patches:
        assert f"{patch.name}: applies" in done.stdout
    assert "series: applies, clean" in done.stdout


def test_our_own_tests_on_a_patched_ray_are_there(check):
    """For one wrong name check.py would run none of them, and report it after half an hour."""
    assert [name for name in check.PACKAGE_TESTS if not (_ROOT / "tests" / "ray" / name).is_file()] == []


def test_the_page_has_every_patch(patches):
    """docs/development/upstream.md has a cover letter for each patch, with its size and its reproductions."""
    page = (_ROOT / "docs" / "development" / "upstream.md").read_text()
    sizes = re.findall(r"^\| (\d+) \| .* \| (\d+) \| [^|]+ \|$", page, re.MULTILINE)
    assert sizes == [(str(number), str(patch.num_changed_lines)) for number, patch in enumerate(patches, 1)]
    for number, patch in enumerate(patches, 1):
        subject = re.search(r"^Subject: \[PATCH\] \[Train\] (.+)$", patch.path.read_text(), re.MULTILINE)[1]
        letter = page.partition(f"\n## {number}. {subject}\n")[2].partition("\n## ")[0]
        for test in patch.reproductions:
            assert f"::{re.split('::|[[]', test)[1]}`" in letter


def changed(check, patch, tmp_path, old, new):
    """Return the patch with a changed text."""
    path = tmp_path / "0001-changed.patch"
    text = patch.path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return check.Patch(path)


@pytest.mark.full
def test_a_patch_that_does_not_apply(check, patches, tmp_path):
    """The error shows only the hunk that fails."""
    wrong = changed(
        check, patches[3], tmp_path, "         else:\n             raise", "         elif:\n             raise"
    )
    with pytest.raises(check.CheckError, match=r"0001-changed\.patch does not apply") as raised:
        check.Tree(tmp_path / "tree", [wrong])
    assert "+            _get_within(worker_group, setup_futures, timeout_s)" in str(raised.value)
    assert "_START_GRACE_PERIOD_S" not in str(raised.value)


@pytest.mark.full
def test_patches_that_contradict(check, patches, tmp_path):
    """The error shows the conflict of a patch that applies by itself but not after the others."""
    other = changed(check, patches[4], tmp_path, '"127.0.0.1"', '"127.0.0.2"')
    with pytest.raises(check.CheckError, match="applies alone, not after the others") as raised:
        check.Tree(tmp_path / "tree", [patches[4], other])
    assert "127.0.0.2" in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "\n+                master_addr",
            "\n+" * 80 + "                master_addr",
            "changes 85 lines, the bound is 80",
        ),
        ("Reproduced-by: ", "", "names no test that fails without it"),
        ("test_torch_master_address.py", "test_nothing.py", "no file of upstream/tests has test_nothing.py::"),
    ],
)
def test_requirements_of_a_patch(check, patches, tmp_path, old, new, told):
    """A patch must be small and have existing tests."""
    with pytest.raises(check.CheckError, match=told):
        check.check_patches(None, [changed(check, patches[4], tmp_path, old, new)])


@dataclass
class Folder:
    """The parts of a tree that running tests needs."""

    folder: Path

    def switch(self, branch):
        pass


@pytest.mark.parametrize(
    ("body", "how", "wanted", "right"),
    [
        ("pass", "passed", "passed", True),
        pytest.param("pass", "passed", "failed", False, marks=pytest.mark.full),
        pytest.param("assert 1 == 2", "failed", "failed", True, marks=pytest.mark.full),
        ("assert 1 == 2", "failed", "passed", False),
        ("pytest.skip('no GPU')", "skipped", "passed", False),
    ],
)
def test_outcomes(check, tmp_path, capfd, body, how, wanted, right):
    """A test with an unexpected result fails the check and shows its output; so does a run in which all tests are skipped."""
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert check.expect(Folder(tmp_path), "stock", tmp_path, ["test_it.py"], wanted) == right
    told = capfd.readouterr().out
    assert ("short test summary" in told) == (not right)
    if how != "passed" or not right:
        assert f"test_it::test_it {how}: " in told


def test_a_file_that_cannot_be_imported(check, tmp_path, capfd):
    """An import error does not count as the expected failure of a reproduction."""
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    assert not check.expect(Folder(tmp_path), "stock", tmp_path, ["test_it.py"], "failed")
    assert "no_such_module" in capfd.readouterr().out
