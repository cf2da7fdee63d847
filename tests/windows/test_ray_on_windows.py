"""Scripts with their own Ray on Windows: training, and what an interrupted script leaves."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.worker.network import gloo_missing, interfaces, resolve
from tests.processes import loopback_name, processes_with, python_path, under_wine, wait_until
from tests.windows.train_script import REMOVE

pytestmark = [
    pytest.mark.windows(reason="Ray's processes on Windows"),
    pytest.mark.timeout(600),
]

HERE = Path(__file__).parent
# Letters in a user's name, and therefore in the user's paths.
FOLDER = "my résults ü"
RUN_S = 400
GONE_S = 30
_MARK = "RAY_FRACBACKEND_TEST_RUN"

needs_gloo = pytest.mark.skipif(gloo_missing() is not None, reason="torch without a Gloo transport")


@dataclass(frozen=True)
class Ended:
    """Result of a script.

    Attributes:
        code: Exit code.
        output: Output of the script and its workers.
        folder: Folder of its results.
        left: Processes that it started, directly or not, and that still existed after GONE_S.
    """

    code: int
    output: str
    folder: Path
    left: list[str]

    @property
    def found(self) -> dict[str, object]:
        result: dict[str, object] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return result


def run(command: list[str | Path], folder: Path, cwd: Path | None = None, **variables: str) -> Ended:
    """Run a script in its own hidden console; a variable marks all its processes."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": python_path(),
        _MARK: mark,
        **variables,
    }
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                [sys.executable, *map(str, command)],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                creationflags=subprocess.CREATE_NO_WINDOW,
                timeout=RUN_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        left = _left(mark)
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"), folder, left)


def _left(mark: str) -> list[str]:
    """Wait until all processes of a script have ended; end the others and return their command lines."""
    end = time.monotonic() + GONE_S
    while (found := processes_with(_MARK, mark)) and time.monotonic() < end:
        time.sleep(0.5)
    lines = []
    for process in found:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
            process.kill()
    return lines


@contextmanager
def results_folder(drive: str | None = None) -> Iterator[Path]:
    """Return a new folder with blanks and non-ASCII letters, in the temporary folder or on a drive."""
    root = Path(tempfile.mkdtemp(dir=f"{drive}\\" if drive else None))
    made = root / FOLDER
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)


def other_drive() -> str | None:
    """Return a drive with space for results other than that of the temporary folder."""
    own = Path(tempfile.gettempdir()).drive.upper()
    mask = ctypes.WinDLL("kernel32").GetLogicalDrives()
    for number, letter in enumerate(string.ascii_uppercase):
        drive = f"{letter}:"
        if drive == own or not mask >> number & 1:
            continue
        with suppress(OSError):
            os.rmdir(tempfile.mkdtemp(dir=f"{drive}\\"))
            return drive
    return None


@needs_gloo
def test_trains() -> None:
    """Script, working directory and results have blanks and non-ASCII letters, the results are on another drive if there is one.

    Two workers with half a logical GPU each train on the CPU, with USE_LIBUV=1 in the script's environment: each has
    MASTER_ADDR=127.0.0.1, USE_LIBUV=0 and GLOO_SOCKET_IFNAME of the loopback adapter (rule 1 of docs/windows.md), and only rank 0's store
    has a socket on another address.
    """
    drive = other_drive()
    with results_folder() as own, results_folder(drive) as results:
        script = Path(shutil.copy(HERE / "train_script.py", own / "train script ü.py"))
        ended = run([script, results], results, cwd=own, USE_LIBUV="1")
        assert ended.code == 0, ended.output
        assert ended.left == []
        metrics: Any = ended.found["metrics"]
        expected = {"total": 3.0, "MASTER_ADDR": "127.0.0.1", "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": loopback_name()}
        assert metrics["sockets"] == []
        assert {name: metrics[name] for name in expected} == expected
        assert "this line is expected and harmless" in ended.output
        assert "model.pt" in ended.found["files"]  # type: ignore[operator]
        assert ended.found["keys"] == ["bias", "weight"]
        (path,) = (results / "run").rglob("start_report.json")  # with V1 in the trial's folder
        report = json.loads(path.read_text(encoding="utf-8"))
        assert report["backend"] == "gloo" or "staged" in report["backend"]
        assert report["master_addr"] == "127.0.0.1"
        assert report["verification"]["latency_s"] > 0
        assert list(path.parent.glob("checkpoint_*/model.pt"))


@needs_gloo
@pytest.mark.skipif(
    "REMOVABLE_ADAPTER" not in os.environ, reason="needs an adapter that can be removed: ci/wine.py --strict"
)
def test_an_adapter_that_vanishes(tmp_path: Path) -> None:
    """Wi-Fi that sleeps, or a VPN that ends, does not disturb a training on one machine, although the host name has its address."""
    REMOVE.unlink(missing_ok=True)
    assert wait_until(lambda: os.environ["REMOVABLE_ADAPTER"] in interfaces(), 30)
    assert "127.0.0.1" not in resolve(socket.gethostname())
    try:
        ended = run([HERE / "train_script.py", tmp_path, "--remove-adapter"], tmp_path)
        assert ended.found["metrics"]["total"] == 3.0, ended.output  # type: ignore[index]
        assert os.environ["REMOVABLE_ADAPTER"] not in interfaces()  # those that are up
    finally:
        REMOVE.unlink(missing_ok=True)


@needs_gloo
def test_a_worker_killed_in_the_start(tmp_path: Path) -> None:
    """The error names its rank; its peer ends too, and the workers that V2 starts instead train."""
    ended = run([HERE / "train_script.py", tmp_path, "--kill-in-start"], tmp_path)
    killed = int((tmp_path / "started.1").read_text())
    told = (tmp_path / "error").read_text()
    assert re.search(rf"rank 1 \(node [^)]*, pid {killed}\) died during start-up", told), ended.output
    assert "error" in ended.found or ended.found["metrics"]["total"] == 3.0, ended.output  # type: ignore[index]
    assert ended.left == []


@needs_gloo
@pytest.mark.parametrize(
    "how",
    [
        "C",
        pytest.param("BREAK", marks=pytest.mark.skipif(under_wine(), reason="Wine: calls no handler of Ctrl-Break")),
        "KILL",
    ],
)
def test_a_script_that_is_ended(tmp_path: Path, how: str) -> None:
    """Ctrl-C, Ctrl-Break or Task Manager end the script during training, and no process is left."""
    script = [HERE / "train_script.py", tmp_path, "--steps", "100000"]
    ended = run([HERE / "console.py", how, tmp_path, *script], tmp_path)
    assert re.search(r"^ended (?!None)\S+ ", ended.output, re.MULTILINE), ended.output
    assert ended.left == []
    if v2_enabled() or how != "C":  # V1's fit() returns after Ctrl-C, and the script goes on
        assert not (tmp_path / "result.json").exists()


@pytest.mark.skipif(gloo_missing() is None, reason="this torch has a Gloo transport")
def test_our_start_without_a_transport(tmp_path: Path) -> None:
    """The start is refused before any rank waits, with the versions to install."""
    ended = run([HERE / "train_script.py", tmp_path], tmp_path)
    assert "2.7.1 or older, or 2.11.0 or newer" in str(ended.found["error"]), ended.output
    assert not (tmp_path / "training.0").exists()
    assert ended.left == []
