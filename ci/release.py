"""All steps of a release except the upload, for .github/workflows/release.yml and for people.

usage: python ci/release.py check-tag TAG     check that the tag is v plus the version, and that the changelog has its dated section
       python ci/release.py build FOLDER      build the source archive, and the wheel from it, into an empty or new folder
       python ci/release.py test FOLDER       test that wheel: twine, then a new virtual environment, where every command runs

`test` needs twine. The tested files are uploaded: nothing is built a second time.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import tempfile
from pathlib import Path

from commands import COMMANDS, run_commands
from common import ROOT, install, make_venv, run

SMOKE = """
import sys
import ray_fracbackend
from ray_fracbackend import FracTorchConfig, verify_process_group
assert "site-packages" in ray_fracbackend.__file__, ray_fracbackend.__file__
assert ray_fracbackend.__version__ == sys.argv[1], ray_fracbackend.__version__
assert FracTorchConfig().backend == "auto"
"""


def version() -> str:
    """Return the version of the checkout without importing it, because that needs Ray and torch."""
    text = (ROOT / "ray_fracbackend" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    return str(found)


def check_tag(tag: str) -> None:
    """Check that a tag matches the version, and that the changelog has a section for the version.

    Raises:
        SystemExit: A check failed.
    """
    if tag != f"v{version()}":
        sys.exit(f"the tag is {tag} and __version__ is {version()}: the tag must be v{version()}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dates = re.findall(rf"^## \[{re.escape(version())}\] - (\S+)$", changelog, flags=re.MULTILINE)
    if len(dates) != 1:
        sys.exit(f"CHANGELOG.md must have one section '## [{version()}] - YYYY-MM-DD', it has {len(dates)}")
    try:
        datetime.datetime.strptime(dates[0], "%Y-%m-%d")
    except ValueError:
        sys.exit(f"CHANGELOG.md: the date of {version()} is {dates[0]}, it must be YYYY-MM-DD")
    print(f"{tag}: released on {dates[0]}")


def built(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source archive of the version in a folder.

    Raises:
        SystemExit: The folder contains other files, which would be uploaded too, or one is missing.
    """
    wanted = [f"ray_fracbackend-{version()}-py3-none-any.whl", f"ray_fracbackend-{version()}.tar.gz"]
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if found != sorted(wanted):
        sys.exit(f"{folder} must have {' and '.join(wanted)} alone, it has {', '.join(found) or 'nothing'}")
    return folder / wanted[0], folder / wanted[1]


def build(folder: Path) -> None:
    """Build both files with the packages of ci/build-requirements.txt alone.

    Raises:
        SystemExit: The folder is not empty, or a build failed.
    """
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: what lies there would be uploaded too")
    with tempfile.TemporaryDirectory(prefix="ray-fracbackend-build-") as name:
        python = make_venv(Path(name))
        run(python, "-m", "pip", "install", "--require-hashes", "-r", ROOT / "ci" / "build-requirements.txt")
        run(python, "-m", "build", "--no-isolation", "--outdir", folder)
    built(folder)


def test(folder: Path) -> None:
    """Check both files with twine. Install the wheel into a new environment and run every command of the command line.

    Raises:
        SystemExit: Something failed.
    """
    wheel, archive = built(folder)
    # In a checkout pip would find the package there and install nothing, but the wheel must be tested.
    os.environ.pop("PYTHONPATH", None)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, archive)
    with tempfile.TemporaryDirectory(prefix="ray-fracbackend-release-", ignore_cleanup_errors=True) as name:
        python = make_venv(Path(name) / "venv")
        install(python, f"{wheel}[demo]")
        # -I: do not import from the current folder.
        run(python, "-I", "-c", SMOKE, version())
        run(python, "-I", "-m", "ray_fracbackend", "--version")
        # Ray's workers also import from the driver's folder, so it must not be the checkout.
        elsewhere = Path(name) / "elsewhere"
        elsewhere.mkdir()
        program = str(python.with_name("ray-fracbackend" + python.suffix))
        if not run_commands(COMMANDS, [program], elsewhere):
            sys.exit("a command of the wheel failed, see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    steps.add_parser("check-tag", help="compare a tag with version and changelog").add_argument("tag", metavar="TAG")
    for name, text in (("build", "build wheel and source archive"), ("test", "test what was built")):
        steps.add_parser(name, help=text).add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.step == "check-tag":
        check_tag(options.tag)
    else:
        {"build": build, "test": test}[options.step](options.folder.absolute())


if __name__ == "__main__":
    main()
