"""The options of the command line that set FracTorchConfig."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ray_fracbackend.cli import _parser, _settings
from ray_fracbackend.decide.settings import Settings

_OPTIONS = [
    ("--backend gloo", {"backend": "gloo"}),
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
@pytest.mark.parametrize("command", ["run {} script.py", "plan --num-workers 2 {}"])
def test_options_are_settings(command: str, option: str, settings: dict[str, object]) -> None:
    """Each option gives the setting's value, and what is not given is left to the script or the default."""
    found = _settings(_parser().parse_args(command.format(option).split()))
    assert found == settings
    Settings(**found)


def test_every_setting_with_help_has_an_option() -> None:
    """The options are made from the fields, so that a new setting is there too."""
    with_help = {setting.name for setting in fields(Settings) if setting.metadata["help"]}
    assert with_help == {name for _, settings in _OPTIONS for name in settings}


def test_a_port_that_is_no_number_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the option."""
    with pytest.raises(SystemExit, match="2"):
        _parser().parse_args(["run", "--master-port", "high", "script.py"])
    assert "--master-port" in capsys.readouterr().err
