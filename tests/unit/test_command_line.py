"""The options of the command line, what wrong ones end with, and commands where a package is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ray_fracbackend.cli import arguments, main
from ray_fracbackend.cli.arguments import parser, setting_options, settings_of
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
    """Each option gives the setting's value, and what is not given is left to the script or the default."""
    found = settings_of(parser().parse_args(command.format(option).split()))
    assert found == settings
    Settings(**found)


def test_every_setting_has_an_option() -> None:
    """The options are made from the fields, so that a new setting is there too."""
    assert {setting.name for setting in fields(Settings)} == {name for _, settings in _OPTIONS for name in settings}
    assert set(setting_options().values()) == {option.split()[0] for option, _ in _OPTIONS}


def test_every_setting_has_a_help() -> None:
    """The texts are in a table of the command line, which has each setting and nothing else."""
    assert list(arguments._OPTIONS) == [setting.name for setting in fields(Settings)]
    assert all(option.help for option in arguments._OPTIONS.values())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "run --master-port high script.py",
            "--master-port: must be a port such as 29500 or a range such as 29500-29600, got 'high'",
        ),
        (
            "run --start-timeout-s x script.py",
            "--start-timeout-s: must be a finite number of seconds above 0, up to 1e9, such as 30, got 'x'",
        ),
        ("plan --num-workers 2.5", "--num-workers: must be a whole number from 1 to 10000, got '2.5'"),
        ("plan --num-workers 99999999999999999999", "--num-workers: must be a whole number from 1 to 10000, got '9999"),
        (
            "plan --num-workers 1 --gpus-per-worker nan",
            "which is Ray's precision, such as 0.5, got 'nan'",
        ),
        (
            "plan --num-workers 1 --gpus-per-worker 1.5",
            "must be a whole number above 1, as Ray divides single GPUs alone, got '1.5'",
        ),
        (
            "test --cpus-per-worker 0.00001",
            "with at most four decimals, which is Ray's precision, such as 0.5, got '0.00001'",
        ),
        (
            "plan --num-workers 1 --timeout-s inf",
            "--timeout-s: must be a finite number of seconds above 0, up to 1e9, such as 30, got 'inf'",
        ),
        (
            "doctor --timeout-s abc",
            "--timeout-s: must be a finite number of seconds above 0, up to 1e9, such as 30, got 'abc'",
        ),
        ("demo --epochs x", "--epochs: must be a whole number from 1 to"),
        ("run", "the following arguments are required: SCRIPT\n"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with option, rule and value, without names of functions and without optional arguments."""
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.startswith("usage: ray-fracbackend")) == ("", True)
    assert said in errors


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --num-workers 2 --backend glo", "backend 'glo' is left to Ray Train (did you mean 'gloo'?)"),
        ("plan --num-workers 2 --backend gloo,", "FracTorchConfig(backend='gloo,')"),
        ("plan --num-workers 2 --cpus-per-worker 0", "needs workers with resources"),
        ("test --master-addr 0.0.0.0", "master_addr must be an IP address or a host name of rank 0's node"),
        ("run -m no_such_module_here", "-m no_such_module_here: there is no such module"),
        ("run nowhere.py", "SCRIPT 'nowhere.py' is not a file"),
    ],
)
def test_what_is_found_before_any_ray_starts(line: str, said: str, capsys, monkeypatch) -> None:
    """Exit code 2, and one line on standard error that begins with the command."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"ray-fracbackend {line.split()[0]}: ")
    assert said in errors


@pytest.mark.parametrize("line", ["plan --json", "plan --json --num-workers 0", "doctor --json --colour"])
def test_wrong_usage_as_json(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs that asked for JSON get it, and nothing else."""
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert json.loads(output)["error"]["reason"] == "wrong_usage"
    assert errors == ""


def test_an_error_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One shape for all commands, on standard output."""
    assert main(["plan", "--num-workers", "2", "--backend", "mpi", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "ok": False,
        "error": {
            "reason": "wrong_usage",
            "message": "backend 'mpi' is left to Ray Train: there is nothing to plan.",
            "ranks": [],
        },
    }


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torch", ["plan", "--num-workers", "2"]),
        *(
            pytest.param(package, command, marks=pytest.mark.full)
            for package, command in [("ray", ["demo"]), ("ray", ["test"]), ("torch", ["run", __file__])]
        ),
    ],
)
def test_a_package_that_does_not_import(tmp_path: Path, package: str, command: list[str]) -> None:
    """A line with the cause in place of a traceback, such as for a torch that lacks a library of the driver."""
    (tmp_path / f"{package}.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "ray_fracbackend", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"ray-fracbackend {command[0]}: {package} cannot be imported (OSError: libcudart.so.12: cannot open shared object file); "
        "ray-fracbackend doctor names what is missing and what to install\n"
    )
