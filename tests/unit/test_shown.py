"""What comes from elsewhere loses its control characters and passwords, wherever the package shows it."""

import json
import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from ray_fracbackend.cli import _show
from ray_fracbackend.cli.output import emit, say
from ray_fracbackend.cli.program import Outcome
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.ipc import IpcError
from ray_fracbackend.ipc.protocol import gloo
from ray_fracbackend.log import logger
from ray_fracbackend.report.file import REPORT_FILE, save_report
from ray_fracbackend.shown import may_be_secret
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.worker.store import open_store
from tests.unit.builders import gpu, worker
from tests.unit.test_report import start_report  # noqa: F401
from tests.unit.test_saved_report import group

TOLD = "a\x1b]0;owned\x07\r\x9b2Jb\tc\nd tcp://user:p@'w@head:1"
SHOWN = "a]0;owned2Jb\tc\nd tcp://***@head:1"


def test_every_exit(capsys, caplog, tmp_path, start_report):  # noqa: F811
    """Terminal, errors, log, report."""
    emit(TOLD)
    say("program", TOLD)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"program: {SHOWN}\n")
    _show(Outcome("", {TOLD: [TOLD]}), True)
    assert json.loads(capsys.readouterr().out)[SHOWN] == [SHOWN]
    assert str(FracBackendError(TOLD, advice=TOLD)) == f"{SHOWN} {SHOWN}"
    assert str(IpcError(TOLD)) == SHOWN
    with caplog.at_level(logging.WARNING, logger.name):
        logger.warning("%d: %s", 1, TOLD)
    assert caplog.messages == [f"ray_fracbackend: 1: {SHOWN}"]
    report = replace(start_report, workers=(worker(0, gpu(name=TOLD)),))
    assert SHOWN in str(report)
    save_report(group(tmp_path), report.to_dict())
    saved = json.loads((tmp_path / REPORT_FILE).read_text())
    assert saved["workers"][0]["devices"][0]["uuid"].endswith("d tcp://***@head:1")


def test_names_of_secrets():
    names = "TOKEN SECRET PASSWORD PASSWD PASSPHRASE PWD CREDENTIALS KEY APIKEY PRIVATE COOKIE AUTH_HEADER SAS DSN"
    assert [name for name in names.split() if not may_be_secret(f"NCCL_X_{name}")] == []
    assert not may_be_secret("NCCL_IB_PKEY")


def test_texts_of_torch_in_another_code_page(monkeypatch):
    """On Windows torch raises a UnicodeDecodeError in place of its error if the system's text has letters outside of ASCII."""
    fail = partial(bytes.decode, b"port unzul\xe4ssig")
    with pytest.raises(RuntimeError, match=r"port unzul.ssig"):
        bounded(fail, 10)
    monkeypatch.setattr(gloo, "ProcessGroupGloo", lambda *_: fail())
    with pytest.raises(IpcError, match=r"cannot connect through Gloo: port unzul.ssig"):
        gloo.GlooCollectives(open_store(host="127.0.0.1"), 0, ["rank 0"], timedelta(seconds=1))
