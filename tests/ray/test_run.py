"""ray-fracbackend run with an unedited script. With the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.cli.run import replace_torch_config
from tests.processes import python_path
from tests.ray.conftest import HALF_GPU

SCRIPT = Path(__file__).with_name("stock_script.py")
needs_v2 = pytest.mark.skipif(not v2_enabled(), reason="callbacks by environment variable are of the V2 engine")


def run(*arguments, cwd=None, command=("-m", "ray_fracbackend", "run"), **env):
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), **env},
    )


def answers(folder, name):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-rank*.json"))]


@pytest.mark.full
def test_the_script_trains(tmp_path):
    """A script without a TorchConfig trains with FracTorchConfig, its module beside it and its class included."""
    done = run("--on-missing-cuda", "cpu", SCRIPT, "none", tmp_path)
    assert done.returncode == 0, done.stderr
    found = answers(tmp_path, "none")
    assert [answer["started_by_us"] for answer in found] == [True, True]
    assert [answer["helper"] for answer in found] == [42, 42], "the workers found the module beside the script"
    if not torch.cuda.is_available():
        assert {answer["backend"] for answer in found} == {"gloo"}


CHOICES = {
    "nothing": (None, "auto", 1800),
    "defaults": (TorchConfig(), "auto", 1800),
    "gloo": (TorchConfig(backend="gloo", timeout_s=77), "gloo", 77),
    "nccl by another path": (ray.train.torch.config.TorchConfig("nccl", "tcp"), "nccl", 1800),
}


@pytest.fixture
def replaced(monkeypatch):
    """The replacement, in this process and for this test alone."""
    monkeypatch.setattr(TorchTrainer, "__init__", TorchTrainer.__init__)
    replace_torch_config({"on_missing_cuda": "cpu"})


def train_func():
    """Never runs: these tests look at the trainer alone."""


@pytest.mark.parametrize(("config", "backend", "timeout_s"), CHOICES.values(), ids=CHOICES)
def test_config_of_a_trainer(replaced, config, backend, timeout_s):
    """What the script chose is kept, the settings are ours, and V1 builds the trainer of its trial with the same."""
    arguments = {} if config is None else {"torch_config": config}
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=True), **arguments)
    found = trainer.backend_config if v2_enabled() else trainer._backend_config
    assert type(found) is FracTorchConfig
    assert (found.backend, found.timeout_s, found.on_missing_cuda) == (backend, timeout_s, "cpu")
    if not v2_enabled():
        assert trainer._param_dict["torch_config"] is found


def test_configs_that_are_no_torch_config_stay(replaced):
    """A FracTorchConfig of the script has its own settings, and another subclass starts something else."""

    class Other(TorchConfig):
        """Starts something else."""

    for config in (FracTorchConfig(on_missing_cuda="error"), Other()):
        trainer = TorchTrainer(train_func, torch_config=config)
        assert (trainer.backend_config if v2_enabled() else trainer._backend_config) is config


@pytest.mark.full
def test_settings_reach_the_start(tmp_path):
    """Without --on-missing-cuda the same script ends with our error, which names the cause, and with exit code 1."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    done = run("--start-timeout-s", "60", SCRIPT, "none", tmp_path)
    assert done.returncode == 1
    assert "on_missing_cuda='cpu'" in done.stderr
    assert not answers(tmp_path, "none")


@needs_v2
@pytest.mark.full
def test_trainers_in_a_tune_function(tmp_path):
    """Trainers that a Tune function makes in processes of their own are replaced too."""
    done = run("--on-missing-cuda", "cpu", SCRIPT, "tune", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert [answer["started_by_us"] for answer in answers(tmp_path, name)] == [True, True]


def tell_backend(config):
    """Which start a worker had."""
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    told = [get_start_report().backend, dist.get_backend()]
    Path(config["out"], f"{dist.get_rank()}.json").write_text(json.dumps(told))


@needs_v2
@pytest.mark.full
def test_callback(cluster, tmp_path, monkeypatch):
    """With the two variables set, a trainer with a plain TorchConfig starts with FracTorchConfig and the settings."""
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_fracbackend.integrations.callback.FracTorchCallback")
    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", '{"on_missing_cuda": "cpu"}')
    TorchTrainer(
        tell_backend,
        train_loop_config={"out": str(tmp_path)},
        torch_config=TorchConfig("nccl"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=HALF_GPU),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [["gloo", "gloo"]] * 2


@needs_v2
@pytest.mark.full
def test_callback_alone(tmp_path):
    """With the two variables set, plain python trains with FracTorchConfig: no change of script or command."""
    done = run(
        SCRIPT,
        "nccl",
        tmp_path,
        command=(),
        RAY_TRAIN_CALLBACKS="ray_fracbackend.integrations.callback.FracTorchCallback",
        RAY_FRACBACKEND_SETTINGS='{"on_missing_cuda": "cpu"}',
    )
    assert done.returncode == 0, done.stderr
    assert [answer["started_by_us"] for answer in answers(tmp_path, "nccl")] == [True, True]


@needs_v2
@pytest.mark.parametrize("settings", ["nothing", "[]", '{"on_missing_cuda": "gpu"}', '{"colour": "red"}'])
def test_callback_with_wrong_settings(monkeypatch, settings):
    """A wrong variable is a ValueError that has its name and value."""
    from ray_fracbackend.integrations.callback import FracTorchCallback

    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", settings)
    with pytest.raises(ValueError, match="RAY_FRACBACKEND_SETTINGS="):
        FracTorchCallback()


@pytest.mark.full
def test_as_with_python(tmp_path):
    """argv, __main__, sys.path, the working directory and the exit code are those of python SCRIPT."""
    arguments = ("exit", "x", "--json", "--", "--on-missing-cuda", "-h")
    ours = run(SCRIPT, *arguments, cwd=tmp_path)
    plain = run(SCRIPT, *arguments, cwd=tmp_path, command=())
    assert plain.returncode == 7
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert "main __main__" in ours.stdout


@pytest.mark.full
def test_exception_of_the_script(tmp_path):
    """An exception of the script is its traceback and exit code 1."""
    done = run(SCRIPT, "raise", tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'from the script'" in done.stderr


@pytest.mark.full(but="V2")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "SCRIPT"),
        (("nowhere.py",), "'nowhere.py' is not a file"),
        (("--on-shared-device", "never", SCRIPT), "invalid choice: 'never'"),
        (("--start-timeout-s", "0", SCRIPT), "must be a finite number of seconds above 0"),
        (("--backend", "nccl,", SCRIPT), "FracTorchConfig(backend='nccl,')"),
    ],
)
def test_wrong_usage(arguments, said):
    """Wrong usage is exit code 2 and says what is wrong, before anything starts."""
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
