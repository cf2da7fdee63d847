"""Options of the command line, errors for wrong options, and commands with a broken package."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from ray_fracbackend.cli import main, options
from ray_fracbackend.cli.doctor.report import Check, Node
from ray_fracbackend.cli.options import setting_options, settings_of
from ray_fracbackend.cli.parser import parser
from ray_fracbackend.decide.settings import Settings

ROOT = Path(__file__).parents[2]
_OPTIONS = [
    ("--backend gloo", {"backend": "gloo"}),
    ("--init-method tcp", {"init_method": "tcp"}),
    ("--collective-timeout-s 60", {"timeout_s": 60.0}),
    ("--on-shared-device error", {"on_shared_device": "error"}),
    ("--on-missing-cuda cpu", {"on_missing_cuda": "cpu"}),
    ("--no-verify", {"verify": False}),
    ("--start-timeout-s 60", {"start_timeout_s": 60.0}),
    ("--master-addr 10.0.0.3", {"master_addr": "10.0.0.3"}),
    ("--master-port 29500", {"master_port": 29500}),
    ("--master-port 29500-29600", {"master_port": (29500, 29600)}),
    ("--limit-gpu-memory", {"limit_gpu_memory": True}),
]


@pytest.mark.parametrize(("option", "settings"), _OPTIONS)
@pytest.mark.parametrize("command", ["run {} script.py", "run {} -m module", "plan --num-workers 2 {}", "test {}"])
def test_options_are_settings(command: str, option: str, settings: dict[str, object]) -> None:
    """Each option sets the value of its setting; without it the script's value or the default is used."""
    found = settings_of(parser().parse_args(command.format(option).split()))
    assert found == settings
    Settings(**found)


def test_every_setting_has_an_option_with_help() -> None:
    """Generated from the fields, so that a new setting has one too."""
    command = argparse.ArgumentParser()
    options.add_settings(command)
    helped = {action.option_strings[0] for action in command._actions if action.help}
    assert helped >= set(setting_options().values()) >= {option.split()[0] for option, _ in _OPTIONS}


@pytest.mark.parametrize(
    ("hint", "text", "value"), [(int, "2", 2), (int | None, "2", 2), (float | None, "0.5", 0.5), (str | None, "2", "2")]
)
def test_a_new_setting_has_an_option_of_its_type(
    hint: Any, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "get_type_hints", lambda of: {**get_type_hints(of), "backend": hint})
    command = argparse.ArgumentParser()
    options.add_settings(command)
    assert command.parse_args(["--backend", text]).backend == value


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --master-port high script.py", "--master-port: invalid ports value: 'high'"),
        ("run --start-timeout-s x script.py", "--start-timeout-s: invalid float value: 'x'"),
        ("run --on-missing-cuda gpu script.py", "invalid choice: 'gpu'"),
        ("plan --num-workers 99999999999999999999", "--num-workers: must be a whole number from 1 to 10000, got '9999"),
        ("plan --num-workers 1 --gpus-per-worker nan", "must be a number from 0 to 1000000, such as 0.5, got 'nan'"),
        ("plan --num-workers 1 --timeout-s inf", "--timeout-s: must be a number of seconds above 0, up to 1e9"),
        ("doctor --timeout-s abc", "--timeout-s: invalid seconds value: 'abc'"),
        ("demo --epochs x", "--epochs: must be a whole number from 1 to"),
        ("run", "the following arguments are required: SCRIPT. `ray-fracbackend run --help`"),
        ("run --on-missing-cude cpu script.py", "unrecognized arguments: --on-missing-cude"),
        ("plan --num-worker=2", "the following arguments are required: --num-workers"),
        ("train", "invalid choice: 'train'"),
        ("run --num-gpus -1 script.py", "--num-gpus: "),
    ],
)
def test_wrong_usage(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n"), errors.startswith("ray-fracbackend: ")) == ("", 1, True)
    assert said in errors


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command each one is listed with its help, on one line."""
    with pytest.raises(SystemExit):
        main([])
    lines = capsys.readouterr().out.splitlines()
    for command in ("doctor", "test", "plan", "run", "demo"):
        assert any(re.match(rf"    {command} +\w", line) for line in lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --num-workers 2 --backend glo", "backend 'glo' is left to Ray Train (did you mean 'gloo'?)"),
        ("plan --num-workers 2 --cpus-per-worker 0", "needs workers with resources"),
        ("test --master-addr 0.0.0.0", "master_addr must be an IP address or a host name of rank 0's node"),
        ("run nowhere.py", "SCRIPT 'nowhere.py' is not a file"),
    ],
)
def test_wrong_usage_is_found_before_ray_starts(line: str, said: str, capsys) -> None:
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"ray-fracbackend {line.split()[0]}: ")
    assert said in errors


def machine_with(*checks):
    """Make the doctor report a machine with these lines."""
    return lambda timeout_s: [Node("this machine", checks)]


def broken(*_):
    raise KeyError("of ours")


_FINE, _WRONG = Check("NCCL", "ok", "2.28.9"), Check("/dev/shm", "problem", "too little", "more")
# Command line, the doctor's lines, exit code, reason, a word of the message.
_ENDS = {
    "good": ("doctor --json", machine_with(_FINE), 0, None, ""),
    "a problem": ("doctor --json", machine_with(_FINE, _WRONG), 1, "problem_found", "1 problem (/dev/shm)"),
    "our bug": ("doctor --json", broken, 1, "internal_error", "KeyError: 'of ours'"),
    "no cluster": ("doctor --json --address 127.0.0.1:1", None, 1, "no_cluster", "127.0.0.1:1"),
    "no address": ("test --json --address nowhere", None, 1, "no_cluster", "no connection to Ray at nowhere"),
    "a value": ("plan --json --num-workers 0", None, 2, "wrong_usage", "from 1 to 10000, got '0'"),
    "an abbreviation": ("doctor --json --time 3", None, 2, "wrong_usage", "--time"),
    "a setting": ("test --json --master-addr 0.0.0.0", None, 2, "wrong_usage", "master_addr"),
    "nothing to plan": (
        "plan --num-workers 2 --backend mpi --json",
        None,
        2,
        "wrong_usage",
        "there is nothing to plan or to test.",
    ),
}


@pytest.mark.parametrize(("line", "found", "code", "reason", "said"), _ENDS.values(), ids=_ENDS)
def test_one_shape_of_json(line, found, code, reason, said, capsys, monkeypatch) -> None:
    """Every command and failure prints one document on standard output, and its ok, error and exit code agree."""
    monkeypatch.setattr("ray_fracbackend.cli.doctor.diagnose.diagnose_machine", found)
    assert main(line.split()) == code
    output, errors = capsys.readouterr()
    document = json.loads(output)
    assert list(document)[:2] == ["ok", "error"]
    assert document["ok"] == (document["error"] is None) == (code == 0)
    error = document["error"] or {"reason": None, "message": "", "ranks": []}
    assert (error["reason"], error["ranks"], set(error)) == (reason, [], {"reason", "message", "ranks"})
    assert said in error["message"]
    assert errors.startswith("Traceback" if reason == "internal_error" else "")


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torch", ["plan", "--num-workers", "2"]),
        pytest.param("ray", ["demo"], marks=pytest.mark.full),
        pytest.param("ray", ["test"], marks=pytest.mark.full),
        pytest.param("torch", ["run", __file__], marks=pytest.mark.full),
    ],
)
def test_a_package_that_does_not_import(tmp_path: Path, package: str, command: list[str]) -> None:
    """One line with the cause replaces the traceback, such as for a torch that lacks a library of the driver."""
    (tmp_path / f"{package}.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    arguments = [sys.executable, "-m", "ray_fracbackend", *command]
    done = subprocess.run(arguments, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ray-fracbackend {command[0]}: {package} cannot be imported (OSError: libcudart.so.12: ")
    assert "ray-fracbackend doctor" in line
