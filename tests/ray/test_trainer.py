"""TorchTrainer end to end. Runs with the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig, MissingDeviceError
from tests.processes import train_worker_processes, wait_until
from tests.ray.conftest import HALF_GPU, run_example
from tests.ray.starts import TRAINING_FAILED, causes

pytestmark = pytest.mark.usefixtures("cluster")

TWO_CPU = ScalingConfig(num_workers=2)
TWO_HALF_GPUS = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=HALF_GPU)
# Ports, process ids and Ray's own data of one run or worker.
_OF_ONE_RUN = ("MASTER_PORT", "RAY_", "PYTEST_", "TUNE_", "TRAIN_", "__")


def fit(train_function, tmp_path, torch_config, scaling_config=TWO_CPU, **settings):
    run_config = RunConfig(name="run", storage_path=str(tmp_path), **settings)
    return TorchTrainer(
        train_function,
        train_loop_config={"out": str(tmp_path)},
        torch_config=torch_config,
        scaling_config=scaling_config,
        run_config=run_config,
    ).fit()


def answers(tmp_path):
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]


def look_around(config, **more):
    """Return the train function's environment, backend and device."""
    import torch.distributed as dist

    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    found = {
        "env": dict(os.environ),
        "backend": dist.get_backend(),
        "timeout_s": group.options._timeout.total_seconds(),
        "device": str(ray.train.torch.get_device()),
        "module": type(ray.train.torch.prepare_model(torch.nn.Linear(2, 2))).__name__,
        **more,
    }
    with open(os.path.join(config["out"], f"rank{dist.get_rank()}.json"), "w") as file:
        json.dump(found, file)
    ray.train.report({"done": 1})


@pytest.mark.full
def test_same_as_stock_where_nothing_is_shared(tmp_path):
    """A CPU job has the same environment, backend, timeout and model wrapping as with TorchConfig."""
    found = {}
    for name, config in {"stock": TorchConfig(timeout_s=600), "ours": FracTorchConfig(timeout_s=600)}.items():
        (tmp_path / name).mkdir()
        fit(look_around, tmp_path / name, config)
        found[name] = answers(tmp_path / name)
        for answer in found[name]:
            address = answer["env"].pop("MASTER_ADDR")
            assert name == "stock" or address == "127.0.0.1"
            answer["env"] = {k: v for k, v in answer["env"].items() if not k.startswith(_OF_ONE_RUN)}
    assert len(found["ours"]) == 2
    assert found["ours"] == found["stock"]
    assert found["ours"][1]["env"]["RANK"] == "1"


@pytest.mark.full
def test_getting_started_script(tmp_path):
    """The script of Ray's documentation trains on logical half GPUs with our config, and its checkpoint loads."""
    done = run_example("fashion_mnist_like.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loaded the model of epoch 2" in done.stdout


def fails_once(config):
    """Fail in the first attempt; return the view of the second, whose workers are new."""
    from ray_fracbackend import get_start_report

    marker = os.path.join(config["out"], "failed")
    if ray.train.get_context().get_world_rank() == 0 and not os.path.exists(marker):
        open(marker, "w").close()
        raise RuntimeError("the first attempt fails")
    look_around(config, pid=os.getpid(), pids=[worker.pid for worker in get_start_report().workers])


def check_cpu_workers(tmp_path):
    """Check the view of every rank of a GPU script on the CPU."""
    assert [(a["device"], a["backend"], a["module"]) for a in answers(tmp_path)] == [
        ("cpu", "gloo", "DistributedDataParallel")
    ] * 2
    assert {a["env"]["ACCELERATE_TORCH_DEVICE"] for a in answers(tmp_path)} == {"cpu"}


@pytest.mark.full  # the run with the lowest Ray includes it
def test_gpu_script_on_the_cpu(tmp_path):
    """get_device() returns cpu in the train function, and the model is wrapped in DDP on the CPU."""
    fit(look_around, tmp_path, FracTorchConfig(backend="gloo", on_missing_cuda="cpu"), TWO_HALF_GPUS)
    check_cpu_workers(tmp_path)


@pytest.mark.full(but="win32")
def test_gpu_script_that_fails_once(tmp_path):
    """Ray starts new workers, which train on the CPU and have their own report in the results folder."""
    config = FracTorchConfig(backend="gloo", on_missing_cuda="cpu")
    result = fit(fails_once, tmp_path, config, TWO_HALF_GPUS, failure_config=FailureConfig(max_failures=1))
    check_cpu_workers(tmp_path)
    assert (tmp_path / "failed").exists()
    pids = answers(tmp_path)[0]["pids"]
    assert [answer["pid"] for answer in answers(tmp_path)] == pids
    saved = json.loads((Path(result.path) / "start_report.json").read_text())
    assert (saved["backend"], saved["verification"]["world_size"]) == ("gloo", 2)
    assert [worker["pid"] for worker in saved["workers"]] == pids
    assert saved["seconds"]["start"] > 0
    assert (saved["earlier"]["number"], saved["earlier"]["result"]) == (1, "started")


def documented(name):
    """Return a function of docs/troubleshooting.md as it is there."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    (code,) = re.findall(rf"```python\n(.*?def {name}.*?)\n\n\ntry:", page, flags=re.DOTALL)
    names = {}
    exec(code, names)
    return names[name]


@pytest.mark.full(but="win32")
def test_missing_cuda_is_an_error_by_default(tmp_path):
    """fit() raises the error with its cause, as docs/troubleshooting.md describes; no worker is left."""
    # The first V2 engines (2.48) raise it unchanged.
    with pytest.raises((*TRAINING_FAILED, MissingDeviceError)) as caught:
        fit(look_around, tmp_path, FracTorchConfig(start_timeout_s=30), TWO_HALF_GPUS)
    assert "on_missing_cuda='cpu'" in causes(caught.value)
    found = documented("start_error")(caught.value)
    assert isinstance(found, MissingDeviceError)
    assert (found.reason, found.ranks) == ("missing_device", (0, 1))
    (path,) = tmp_path.rglob("start_report.json")  # in the results folder of a run that has none
    saved = json.loads(path.read_text())
    assert (saved["ok"], saved["error"]["reason"], saved["error"]["ranks"]) == (False, "missing_device", [0, 1])
    assert len(saved["workers"]) == 2
    # V1 puts a traceback before it.
    assert str(found).endswith(f"{saved['error']['message']}\nreport of this start: {path.as_posix()}")
    assert wait_until(lambda: not train_worker_processes())
