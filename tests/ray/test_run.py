"""ray-fracbackend run with an unedited script. Uses the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.train.torch
import torch
from pyarrow.fs import LocalFileSystem
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.integrations.trainers import replace_torch_config
from tests.processes import processes_with, python_path, wait_until, with_signals
from tests.ray.nodes import head_node, ray_start

SCRIPT = Path(__file__).with_name("stock_script.py")
RUN = ("-m", "ray_fracbackend", "run")
needs_v2 = pytest.mark.skipif(not v2_enabled(), reason="of the V2 engine")


def run(*arguments, cwd=None, command=RUN, **env):
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
    """A script without a TorchConfig trains with FracTorchConfig, including its own module and class."""
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
    """Replace TorchConfig in this process for this test only."""
    monkeypatch.setattr(TorchTrainer, "__init__", TorchTrainer.__init__)
    replace_torch_config({"on_missing_cuda": "cpu"})


def train_func():
    """Never runs: these tests check only the trainer."""


@pytest.mark.parametrize(("config", "backend", "timeout_s"), CHOICES.values(), ids=CHOICES)
def test_config_of_a_trainer(replaced, config, backend, timeout_s):
    """The script's choices are kept, the settings are ours, and V1 builds the trainer of its trial with the same config."""
    arguments = {} if config is None else {"torch_config": config}
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=True), **arguments)
    found = trainer.backend_config if v2_enabled() else trainer._backend_config
    assert type(found) is FracTorchConfig
    assert (found.backend, found.timeout_s, found.on_missing_cuda) == (backend, timeout_s, "cpu")
    if not v2_enabled():
        assert trainer._param_dict["torch_config"] is found


def test_configs_that_are_no_torch_config_stay(replaced):
    """A FracTorchConfig of the script keeps its settings, and another subclass starts something else."""

    class Other(TorchConfig):
        """A config that starts something else."""

    for config in (FracTorchConfig(on_missing_cuda="error"), Other()):
        trainer = TorchTrainer(train_func, torch_config=config)
        assert (trainer.backend_config if v2_enabled() else trainer._backend_config) is config


@needs_v2
@pytest.mark.full
def test_trainers_in_a_tune_function(tmp_path):
    """Trainers that a Tune function creates in separate processes are replaced too."""
    done = run("--on-missing-cuda", "cpu", SCRIPT, "tune", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert [answer["started_by_us"] for answer in answers(tmp_path, name)] == [True, True]


@needs_v2
@pytest.mark.full
def test_callback_alone(tmp_path):
    """With both variables set, plain python trains with FracTorchConfig, without a change of script or command."""
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
    assert re.search(r"run .*: FracTorchConfig\(on_missing_cuda='cpu'\) replaces TorchConfig\(", done.stderr)


@needs_v2
@pytest.mark.parametrize("settings", ["nothing", "[]", '{"on_missing_cuda": "gpu"}', '{"colour": "red"}'])
def test_callback_with_wrong_settings(monkeypatch, caplog, settings):
    """The error and a log line name the variable and its value: Ray raises another error that has only the name of the class."""
    from ray_fracbackend.integrations.callback import FracTorchCallback

    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", settings)
    with pytest.raises(ValueError, match="RAY_FRACBACKEND_SETTINGS=") as caught:
        FracTorchCallback()
    assert [record.getMessage() for record in caplog.records] == [f"ray_fracbackend: {caught.value}"]


@needs_v2
def test_callback_tells_what_it_replaces(monkeypatch, caplog, tmp_path):
    """One line for each configuration that is replaced, with the run; none where nothing is."""
    from ray.train.v2._internal.callbacks import BackendSetupCallback

    from ray_fracbackend.integrations.callback import FracTorchCallback

    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", '{"on_missing_cuda": "cpu"}')
    callbacks = [BackendSetupCallback(TorchConfig("nccl")), BackendSetupCallback(FracTorchConfig())]
    storage = SimpleNamespace(
        storage_filesystem=LocalFileSystem(), experiment_fs_path=f"{tmp_path.as_posix()}/half_gpus"
    )
    with caplog.at_level("INFO", logger="ray.train"):
        for _ in range(2):  # a restart of the workers
            FracTorchCallback().after_worker_group_start(
                SimpleNamespace(_callbacks=callbacks, _storage_context=storage)
            )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "run half_gpus: FracTorchConfig(on_missing_cuda='cpu') replaces TorchConfig(backend='nccl', " in line


# Arguments of python, and its exit code.
_AS_PYTHON = {
    "a script": ([SCRIPT, "exit", "x", "--json", "--", "--on-missing-cuda", "-h"], 7),
    "a module": (["-m", "parts.train", "--epochs", "3"], 5),
    "an error": ([SCRIPT, "raise", "folder"], 1),
    "an error of the syntax": (["broken.py"], 1),
}


@pytest.mark.full
@pytest.mark.parametrize(("arguments", "code"), _AS_PYTHON.values(), ids=_AS_PYTHON)
def test_as_with_python(tmp_path, arguments, code):
    """argv, __main__, the first folders of the path, the exit code and the traceback are those of python SCRIPT."""
    (tmp_path / "parts").mkdir()
    text = "import ray, sys; print(sys.argv, __name__, __package__, __file__, sys.path[:2]); sys.exit(5)"
    (tmp_path / "parts" / "train.py").write_text(text)
    (tmp_path / "broken.py").write_text("def f(:\n")
    ours, plain = run(*arguments, cwd=tmp_path), run(*arguments, cwd=tmp_path, command=())
    assert plain.returncode == code
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


_SCRIPT = """
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    import time, torch.distributed as dist

    open(f"{folder}/trained-{{dist.get_rank()}}", "w").close()
    time.sleep({sleep_s})


{before}
TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={{"CPU": 1, "GPU": 0.5}}),
    run_config=RunConfig(storage_path="{folder}"),
).fit()
"""


class Started:
    """A GPU script in a folder, which the command runs."""

    def __init__(self, folder, *options, before="", sleep_s=0, **env):
        script, self.folder, self._output = folder / "train.py", folder, folder / "output"
        script.write_text(_SCRIPT.format(folder=folder, before=before, sleep_s=sleep_s))
        self.process = subprocess.Popen(
            with_signals(sys.executable, *RUN, *options, str(script)),
            stdout=self._output.open("w"),
            stderr=subprocess.STDOUT,
            # Without an address ray.init() would use another Ray of this machine.
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "RAY_FRACBACKEND_TEST_RUN": str(folder),
                "RAY_ADDRESS": "local",
                **env,
            },
        )

    @property
    def output(self):
        return self._output.read_text()

    def trained(self):
        return sorted(path.name for path in self.folder.glob("trained-*")) == ["trained-0", "trained-1"]

    def processes(self):
        return processes_with("RAY_FRACBACKEND_TEST_RUN", str(self.folder))

    def has_left_nothing(self):
        return wait_until(lambda: not self.processes(), 60)


@pytest.mark.full
def test_logical_gpus(tmp_path):
    """In one command a GPU script without ray.init() trains on a machine without a GPU."""
    script = Started(tmp_path, "--num-gpus", "1", "--num-cpus", "4", "--on-missing-cuda", "cpu")
    assert script.process.wait(250) == 0, script.output
    assert script.trained()


@pytest.mark.full
def test_the_scripts_own_number_of_gpus(tmp_path):
    """It takes precedence, and the option that the script does not set has an effect."""
    (tmp_path / "init.py").write_text(
        "import ray\n"
        "ray.init('local', num_gpus=2, include_dashboard=False)\n"
        "ray.init(ignore_reinit_error=True)\n"
        "print(ray.cluster_resources()['GPU'], ray.cluster_resources()['CPU'])\n"
    )
    done = run("--num-gpus", "5", "--num-cpus", "3", "init.py", cwd=tmp_path)
    assert done.stdout == "2.0 3.0\n", done.stderr


@pytest.mark.full
def test_more_than_a_local_ray_has(tmp_path):
    """An error at once with what is asked for, what there is, and what to ask instead; nothing is left."""
    script = Started(tmp_path, before='ray.init("local", num_cpus=1, num_gpus=0, include_dashboard=False)')
    assert script.process.wait(150) == 1
    said = "InsufficientResourcesError: Ray cannot place 2 workers of 1 CPU and 0.5 GPU each (PACK): "
    assert said in script.output
    assert "declare more with --num-gpus" in script.output
    assert script.has_left_nothing()


@pytest.mark.full
@pytest.mark.linux(reason="two Ray nodes on one machine")
def test_a_cluster_that_grows(tmp_path):
    """On a running cluster the script waits, and trains when a node with GPUs joins."""
    with head_node() as (address, settings):
        script = Started(tmp_path, "--on-missing-cuda", "cpu", **settings, RAY_ADDRESS=address)
        assert wait_until(lambda: "TorchTrainer starts with" in script.output, 100), script.output
        with ray_start(settings, "--address", address, "--num-cpus", "4", "--num-gpus", "1"):
            assert script.process.wait(200) == 0, script.output
        assert script.trained()


# An actor of the script itself has the GPU, and never ends.
_BUSY = """
@ray.remote(num_gpus=1)
class Holder:
    def is_there(self):
        return True


holder = Holder.remote()
assert ray.get(holder.is_there.remote())
"""


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
@pytest.mark.parametrize(
    ("before", "actor"),
    [("", "RayTrainWorker"), pytest.param(_BUSY, "TrainController", marks=needs_v2)],
    ids=["training", "waiting for a GPU"],
)
def test_ctrl_c(tmp_path, before, actor):
    """The script ends within seconds with the shell's exit code, and no process of Ray is left."""
    options = ("--num-gpus", "1", "--num-cpus", "4", "--on-missing-cuda", "cpu")
    script = Started(tmp_path, *options, before=before, sleep_s=600)
    assert wait_until(lambda: any(actor in each.name() for each in script.processes()), 150), script.output
    assert before or wait_until(script.trained, 100), script.output
    script.process.send_signal(signal.SIGINT)
    assert script.process.wait(60) == 130, script.output
    assert script.has_left_nothing()


@pytest.mark.full
def test_the_configuration_is_said(tmp_path):
    """A line shows the configuration of each trainer, and whether the settings have an effect on it."""
    (tmp_path / "train.py").write_text(
        "from ray.train.torch import TorchTrainer\nfrom ray_fracbackend import FracTorchConfig\n"
        "for config in None, FracTorchConfig(verify=False): TorchTrainer(lambda: None, torch_config=config)\n"
    )
    done = run("--backend", "gloo", "train.py", cwd=tmp_path)
    assert [line for line in done.stderr.splitlines() if line.startswith("ray-fracbackend run: ")] == [
        "ray-fracbackend run: TorchTrainer starts with FracTorchConfig(backend='gloo')",
        "ray-fracbackend run: TorchTrainer starts with FracTorchConfig(verify=False); the settings of the command line have no "
        "effect on it",
    ]
