"""Look-ups of names where the name server is silent; a real silent one is in tests/net/test_names_and_addresses.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ray_fracbackend.name_lookups import name_server_silent, short

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the resolver of glibc")


def getent(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a look-up of our own before the system's."""
    program = folder / "getent"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(("script", "silent"), [("exec sleep 60", True), ("exit 2", False), ("exit 0", False)])
def test_only_no_answer_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, silent: bool) -> None:
    """No such name is an answer as good as a name."""
    getent(tmp_path, monkeypatch, script)
    assert name_server_silent("10.0.0.1", 0.5 if silent else 60) is silent


def test_the_question_is_c10ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 is asked for as the mapped address that an IPv6 socket shows, IPv6 as it is."""
    getent(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/asked')
    name_server_silent("10.0.0.1", 60)
    name_server_silent("fd77::1", 60)
    assert (tmp_path / "asked").read_text() == "hosts ::ffff:10.0.0.1\nhosts fd77::1\n"


def test_without_getent_nothing_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small image may not have the program; then nothing is changed."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert not name_server_silent("10.0.0.1")


@pytest.mark.parametrize("before", [None, "ndots:2"])
def test_a_new_process_gets_the_users_options_too(before: str | None) -> None:
    """What RES_OPTIONS says already stays in force beside ours; this process's own is left alone."""
    environment = {} if before is None else {"RES_OPTIONS": before}
    unchanged = os.environ.get("RES_OPTIONS")
    assert short(environment) == {"RES_OPTIONS": f"{before} timeout:1" if before else "timeout:1"}
    assert os.environ.get("RES_OPTIONS") == unchanged
