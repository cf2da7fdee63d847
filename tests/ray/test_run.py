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
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.cli import script as run_module
from ray_fracbackend.integrations.trainers import replace_torch_config
from tests.processes import NAPS, processes_with, python_path, wait_until, with_signals
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


@pytest.mark.full
def test_settings_reach_the_start(tmp_path):
    """Without --on-missing-cuda the same script ends with our error, with the cause, the setting and exit code 1."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    done = run("--start-timeout-s", "60", SCRIPT, "none", tmp_path)
    assert done.returncode == 1
    assert "on_missing_cuda='cpu'" in done.stderr
    assert not answers(tmp_path, "none")


@needs_v2
@pytest.mark.full
def test_trainers_in_a_tune_function(tmp_path):
    """Trainers that a Tune function creates in separate processes are replaced too."""
    done = run("--on-missing-cuda", "cpu", SCRIPT, "tune", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert [answer["started_by_us"] for answer in answers(tmp_path, name)] == [True, True]


def tell_backend(config):
    """Return the backend of a worker's start."""
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    told = [get_start_report().backend, dist.get_backend()]
    Path(config["out"], f"{dist.get_rank()}.json").write_text(json.dumps(told))


@needs_v2
@pytest.mark.full
def test_callback(cluster, tmp_path, monkeypatch):
    """With both variables set, a trainer with a plain TorchConfig starts with FracTorchConfig and the settings."""
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
    assert re.search(
        r"ray_fracbackend: run .*: FracTorchConfig\(on_missing_cuda='cpu'\) replaces TorchConfig\(",
        done.stderr,
    )


@needs_v2
@pytest.mark.parametrize("settings", ["nothing", "[]", '{"on_missing_cuda": "gpu"}', '{"colour": "red"}'])
def test_callback_with_wrong_settings(monkeypatch, settings):
    """A wrong variable raises a ValueError with its name and value."""
    from ray_fracbackend.integrations.callback import FracTorchCallback

    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", settings)
    with pytest.raises(ValueError, match="RAY_FRACBACKEND_SETTINGS="):
        FracTorchCallback()


@needs_v2
def test_callback_with_wrong_settings_in_a_run(cluster, monkeypatch, caplog):
    """Ray's error has only the name of the class; ours is its cause, and in the log."""
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_fracbackend.integrations.callback.FracTorchCallback")
    monkeypatch.setenv("RAY_FRACBACKEND_SETTINGS", '{"on_missing_cuda": "gpu"}')
    with pytest.raises(ValueError, match="Failed to import callback") as caught:
        TorchTrainer(tell_backend).fit()
    text = (
        'RAY_FRACBACKEND_SETTINGS=\'{"on_missing_cuda": "gpu"}\': must be a JSON object of FracTorchConfig\'s settings'
    )
    assert str(caught.value.__cause__).startswith(text)
    assert "on_missing_cuda must be one of 'error', 'cpu'" in str(caught.value.__cause__)
    (line,) = [record for record in caplog.records if text in record.getMessage()]
    assert (line.levelname, line.getMessage()) == ("ERROR", f"ray_fracbackend: {caught.value.__cause__}")


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
    assert line.startswith(
        "ray_fracbackend: run half_gpus: FracTorchConfig(on_missing_cuda='cpu') replaces TorchConfig(backend='nccl', "
    )


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
def test_a_module(tmp_path):
    """-m runs a module like python -m, with arguments, exit code and its folder of sys.path."""
    (tmp_path / "parts").mkdir()
    text = "import ray, sys; print('argv', sys.argv[1:], __name__, __package__, sys.path[:3]); sys.exit(5)"  # Ray puts a folder first
    (tmp_path / "parts" / "train.py").write_text(text)
    ours = run("-m", "parts.train", "--epochs", "3", cwd=tmp_path)
    plain = run("-m", "parts.train", "--epochs", "3", cwd=tmp_path, command=())
    assert plain.returncode == 5
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)


@pytest.mark.full
def test_exception_of_the_script(tmp_path):
    """An exception of the script prints its traceback like python, with exit code 1."""
    done = run(SCRIPT, "raise", tmp_path)
    plain = run(SCRIPT, "raise", tmp_path, command=())
    assert done.returncode == plain.returncode == 1
    assert done.stderr == plain.stderr
    assert "KeyError: 'from the script'" in done.stderr


@pytest.mark.full
def test_a_syntax_error_of_the_script(tmp_path):
    """It has no frame of the script: python prints the place in the file."""
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = run(tmp_path / "broken.py")
    assert done.returncode == 1
    assert "broken.py" in done.stderr
    assert done.stderr.endswith("SyntaxError: invalid syntax\n")
    assert "runpy" not in done.stderr


_TRAINS_LONG = """
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    import time

    open({begun!r}, "w").close()
    time.sleep(600)


ray.init("local", num_cpus=4, include_dashboard=False)
TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()  # line 15
"""


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_stopped_script(tmp_path, number, said):
    """One line of ours with the place in the script, the shell's exit code, no C++ stack, and no process left."""
    begun = tmp_path / "begun"
    (tmp_path / "train.py").write_text(_TRAINS_LONG.format(begun=str(begun)))
    process = start_script(tmp_path)
    assert wait_until(begun.exists, 150)
    process.send_signal(number)
    output, _ = process.communicate(timeout=100)
    if number == signal.SIGINT and not v2_enabled():
        # Tune handles Ctrl-C itself, ends the run in order, and the script continues.
        assert (process.returncode, "Training has been interrupted" in output) == (0, True), output
    else:
        assert process.returncode == 128 + number, output
        # Lines of Ray's actors may follow it.
        ours = [line for line in output.splitlines() if line.startswith("ray-fracbackend run: ")]
        assert ours[-1] == f"ray-fracbackend run: {said} at {tmp_path / 'train.py'}:15", output
    assert "*** SIG" not in output
    assert wait_until(lambda: not processes_with("RAY_FRACBACKEND_TEST_RUN", str(tmp_path)), 60)


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
def test_a_second_sigterm_ends_the_script_at_once(tmp_path):
    """While Ray shuts down, without a traceback and without processes left."""
    begun = tmp_path / "begun"
    (tmp_path / "train.py").write_text(_TRAINS_LONG.format(begun=str(begun)))
    process = start_script(tmp_path)
    assert wait_until(begun.exists, 150)
    process.send_signal(signal.SIGTERM)
    for line in process.stdout:
        if line.startswith("ray-fracbackend run: ended"):
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    assert "Traceback" not in output
    assert wait_until(lambda: not processes_with("RAY_FRACBACKEND_TEST_RUN", str(tmp_path)), 60)


@pytest.mark.linux(reason="signals are those of Unix")
def test_a_default_handler_of_the_script_stays(monkeypatch):
    """If it calls ray.init again."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run_module.ray, "init", lambda **_: None)
    try:
        with run_module._watching_signals():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_module.ray.init(ignore_reinit_error=True)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def start_script(folder):
    """Start train.py in a folder with the command; `processes_with` finds its processes."""
    return subprocess.Popen(
        with_signals(sys.executable, "-m", "ray_fracbackend", "run", "train.py"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "RAY_FRACBACKEND_TEST_RUN": str(folder)},
    )


_HANDLES_CTRL_C = """
import sys, time
try:
    print("begun", flush=True)
    {naps}
except KeyboardInterrupt:
    {body}
"""


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
@pytest.mark.parametrize("body", ["sys.exit(3)", "sys.exit(0)", "raise ValueError('own')", "print('saved')"])
def test_a_script_that_handles_ctrl_c(tmp_path, body):
    """Exit code and traceback are the script's own, also below a folder named ray, such as the home in Ray's images."""
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "train.py").write_text(_HANDLES_CTRL_C.format(naps=NAPS, body=body))
    ended = []
    for command in ("-m", "ray_fracbackend", "run"), ():
        process = subprocess.Popen(
            with_signals(sys.executable, *command, folder / "train.py"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
        own = [line for line in errors.splitlines() if not line.startswith("ray-fracbackend run: ")]
        # Without the lines of the script at which Ctrl-C came, which differ between runs.
        ended.append((process.returncode, output, own[-1:]))
    assert ended[0] == ended[1]


@pytest.mark.full
def test_a_script_beside_the_package(tmp_path):
    """A name that starts like the package's folder does not count as a frame of this command, and __file__ is absolute, as with python."""
    (tmp_path / "ray_fracbackend").symlink_to(Path(__file__).parents[2] / "ray_fracbackend")
    (tmp_path / "ray_fracbackend_try.py").write_text("print(__file__)\nraise ValueError('boom')\n")
    ours = run("ray_fracbackend_try.py", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    plain = run("ray_fracbackend_try.py", cwd=tmp_path, command=())
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


@pytest.mark.full
def test_replacements_are_logged(tmp_path):
    """One line for the configuration of the trainers, and one if the script created no trainer."""
    (tmp_path / "train.py").write_text(
        "from ray.train.torch import TorchTrainer\nfor _ in range(2): TorchTrainer(lambda: None)\n"
    )
    (tmp_path / "other.py").write_text("print('nothing to train')\n")
    made = run("--backend", "gloo", "train.py", cwd=tmp_path)
    (line,) = [line for line in made.stderr.splitlines() if line.startswith("ray-fracbackend run:")]
    assert line.startswith("ray-fracbackend run: TorchTrainer starts with FracTorchConfig(backend='gloo'")
    late = run("other.py", "--on-missing-cuda=cpu", "--epochs", "3", cwd=tmp_path)
    assert "--on-missing-cuda went to your script; put it before the script name to set it here" in late.stderr
    none = run("other.py", cwd=tmp_path)
    assert (none.returncode, none.stdout) == (0, "nothing to train\n")
    assert none.stderr == (
        "ray-fracbackend run: other.py made no TorchTrainer in its own process: no configuration was replaced there\n"
    )


# Options, the trainer of the script, and the lines after the one about its configuration.
_WITHOUT_EFFECT = {
    "its own FracTorchConfig": (
        "--backend ipc --no-verify",
        "torch_config=FracTorchConfig(backend='gloo')",
        ["--backend, --no-verify: no effect, because the script makes its own FracTorchConfig: set them there"],
    ),
    "whole GPUs": (
        "--limit-gpu-memory --on-missing-cuda cpu",
        "scaling_config=ScalingConfig(num_workers=1, use_gpu=True)",
        ["--limit-gpu-memory: no effect, because workers with whole GPUs have no limit"],
    ),
    "no Ray": (
        "--num-gpus 1 --backend gloo",
        "",
        ["--num-gpus 1: no effect, because train.py started no Ray in its own process"],
    ),
}
_TRAINER = """
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray_fracbackend import FracTorchConfig, MissingDeviceError
"""


@pytest.mark.full
@pytest.mark.parametrize(("options", "trainer", "lines"), _WITHOUT_EFFECT.values(), ids=_WITHOUT_EFFECT)
def test_options_without_effect_are_said(tmp_path, options, trainer, lines):
    """One line for each reason, and none for an option that has an effect."""
    (tmp_path / "train.py").write_text(f"{_TRAINER}for _ in range(2): TorchTrainer(lambda: None, {trainer})\n")
    done = run(*options.split(), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ray-fracbackend run: ")]
    assert said[0].startswith("ray-fracbackend run: TorchTrainer starts with ")
    assert [line.removeprefix("ray-fracbackend run: ") for line in said[1:]] == lines


@pytest.mark.full
def test_settings_of_a_script_without_a_trainer(tmp_path):
    """They have no effect in its process."""
    (tmp_path / "other.py").write_text("import sys; sys.exit(0)\n")
    done = run("--backend", "ipc", "other.py", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        "ray-fracbackend run: other.py made no TorchTrainer in its own process: --backend had no effect there"
    )


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
    """Wrong usage exits with code 2 and an explanation, before anything starts."""
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
