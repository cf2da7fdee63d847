"""ray-fracbackend run: logical GPUs and CPUs, and workers that the cluster cannot place. With the engine of RAY_TRAIN_V2_ENABLED."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.cli.waiting import Waits, _pending
from tests.processes import processes_with, python_path, wait_until, with_signals
from tests.ray.nodes import head_node, ray_start

_MARK = "RAY_FRACBACKEND_TEST_RUN"
_SCRIPT = """
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    import torch.distributed as dist

    open(f"{folder}/trained-{{dist.get_rank()}}-{{dist.get_world_size()}}", "w").close()


{before}
resources = {{"CPU": 1, "GPU": 0.5}}
scaling_config = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=resources)
{fit}
"""
_FIT = 'TorchTrainer(train_func, scaling_config=scaling_config, run_config=RunConfig(storage_path="{folder}")).fit()'


def start(folder, *options, before="", **env):
    """The script of a folder under the command, and the file of what it prints; its processes have a mark."""
    script = folder / "train.py"
    script.write_text(_SCRIPT.format(folder=folder, before=before, fit=_FIT.format(folder=folder)))
    output = folder / "output"
    process = subprocess.Popen(
        with_signals(sys.executable, "-m", "ray_fracbackend", "run", *options, str(script)),
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": python_path(), _MARK: str(folder), **env},
    )
    return process, output


def trained(folder):
    return sorted(path.name for path in folder.glob("trained-*"))


def ours(output):
    """Lines of the command, without the one about the configuration."""
    lines = [line for line in output.read_text().splitlines() if line.startswith("ray-fracbackend run: ")]
    return [line.removeprefix("ray-fracbackend run: ") for line in lines if "TorchTrainer starts with" not in line]


def nothing_is_left(folder):
    return wait_until(lambda: not processes_with(_MARK, str(folder)), 60)


@pytest.mark.full
def test_logical_gpus(tmp_path):
    """In one command a GPU script without ray.init() trains on a machine without a GPU."""
    process, output = start(tmp_path, "--num-gpus", "1", "--num-cpus", "4", "--on-missing-cuda", "cpu")
    assert process.wait(250) == 0, output.read_text()
    assert trained(tmp_path) == ["trained-0-2", "trained-1-2"]
    assert ours(output) == ["this Ray has 1 logical GPU and 4 logical CPUs (--num-gpus 1, --num-cpus 4)"]


@pytest.mark.full
def test_the_scripts_own_number_holds(tmp_path):
    """A line says that the option has no effect; the other one has."""
    script = tmp_path / "init.py"
    script.write_text(
        "import ray\n"
        "ray.init('local', num_gpus=2, include_dashboard=False)\n"
        "ray.init(ignore_reinit_error=True)\n"
        "found = ray.cluster_resources()\n"
        "print('GPU', found['GPU'], 'CPU', found['CPU'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ray_fracbackend", "run", "--num-gpus", "5", "--num-cpus", "3", str(script)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert "GPU 2.0 CPU 3.0\n" in done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ray-fracbackend run: ")]
    assert said[:2] == [
        "ray-fracbackend run: --num-gpus 5: no effect, because the script passes num_gpus=2 to ray.init()",
        "ray-fracbackend run: this Ray has 3 logical CPUs (--num-cpus 3)",
    ]


@pytest.mark.full
def test_more_than_a_local_ray_has(tmp_path):
    """An error at once with what is asked for, what there is, and what to ask instead; nothing is left."""
    before = 'ray.init("local", num_cpus=1, num_gpus=0, include_dashboard=False)'
    process, output = start(tmp_path, before=before)
    assert process.wait(150) == 1
    text = output.read_text()
    assert "InsufficientResourcesError: Ray cannot place 2 workers of 1 CPU and 0.5 GPU each (PACK): " in text
    assert "declare more with --num-gpus and --num-cpus" in text
    assert nothing_is_left(tmp_path)


# An actor of the script itself has the GPU, and never ends.
_BUSY = """
@ray.remote(num_gpus=1)
class Holder:
    def is_there(self):
        return True


ray.init("local", num_cpus=4, num_gpus=1, include_dashboard=False)
holder = Holder.remote()
assert ray.get(holder.is_there.remote())
"""


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_script_that_waits(tmp_path, presses):
    """What is needed and free is said, Ctrl-C ends the wait, a second one the process at once, and no process is left."""
    process, output = start(tmp_path, before=_BUSY)
    wanted = "Ray waits to place 2 workers of 1 CPU and 0.5 GPU each (PACK): too little is free ("
    assert wait_until(lambda: any(line.startswith(wanted) for line in ours(output)), 200), output.read_text()
    assert "1 GPU needed and 0 free" in ours(output)[-1]
    process.send_signal(signal.SIGINT)
    if presses == 2:
        first = "Ctrl-C again kills it at once" if v2_enabled() else "Stop signal received"
        assert wait_until(lambda: first in output.read_text(), 60)
        process.send_signal(signal.SIGINT)
    code, text = process.wait(60), output.read_text()
    if not v2_enabled():  # Tune has the handler: it ends the run in order, and the script goes on
        assert presses == 2 or (code == 0 and "Training has been interrupted" in text), text
    elif presses == 1:
        assert code == 130, text
        line = 1 + (tmp_path / "train.py").read_text().splitlines().index(_FIT.format(folder=tmp_path))
        assert ours(output)[-2:] == [
            "Ctrl-C: ending the run; Ctrl-C again kills it at once",
            f"interrupted at {tmp_path / 'train.py'}:{line}",
        ]
    else:
        assert code == -signal.SIGINT, text
    assert nothing_is_left(tmp_path)


@pytest.mark.full
@pytest.mark.linux(reason="two Ray nodes on one machine")
def test_a_cluster_that_grows(tmp_path):
    """On a running cluster a line names what is missing and the script goes on waiting; it trains when such a node joins."""
    with head_node() as (address, settings):
        options = ("--num-gpus", "1", "--on-missing-cuda", "cpu")
        process, output = start(tmp_path, *options, **settings, RAY_ADDRESS=address)
        assert wait_until(lambda: len(ours(output)) == 2, 100), output.read_text()
        effect, waits = ours(output)
        assert (
            effect
            == f"--num-gpus 1: no effect, because the script uses the running Ray cluster at RAY_ADDRESS={address}"
        )
        assert waits.startswith("Ray waits to place 2 workers of 1 CPU and 0.5 GPU each (PACK): the cluster has 1 x (")
        assert waits.endswith("It continues when such nodes join, as from an autoscaler; Ctrl-C ends it")
        with ray_start(settings, "--address", address, "--num-cpus", "4", "--num-gpus", "1"):
            assert process.wait(200) == 0, output.read_text()
        assert trained(tmp_path) == ["trained-0-2", "trained-1-2"]


@pytest.fixture
def pending(cluster):
    """Makes requests that Ray cannot place, of which `_pending` knows."""
    groups = []

    def make(bundles):
        groups.append(placement_group(bundles))
        assert wait_until(lambda: (bundles, "PACK") in _pending())
        return bundles

    yield make
    for group in groups:
        remove_placement_group(group)


def test_lines_are_rare(pending):
    """The second look says what is missing, the next line comes after two minutes, the one after that four minutes later."""
    pending([{"CPU": 1.0, "GPU": 3.0}])
    said = []
    waits = Waits(said.append)
    waits.look(0.0, _pending())
    assert said == [], "what was requested just now is seldom placed yet"
    counts = []
    for now in (2.0, 100.0, 121.0, 123.0, 300.0, 361.0, 363.0):
        waits.look(now, _pending())
        counts.append(len(said))
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    assert said[0].startswith(
        "Ray waits to place one worker of 1 CPU and 3 GPU (PACK): the cluster has 1 x (32 CPU and 2 GPU): room for 0 of them."
    )
    waits.look(1000.0, [])
    waits.look(1001.0, _pending())
    waits.look(1003.0, _pending())
    assert len(said) == 4, "it was placed meanwhile"


def test_resources_that_others_hold(pending):
    """They are often free again soon: half a minute without a line, and then the amounts."""
    assert wait_until(lambda: ray.available_resources().get("GPU") == 2)
    holder = placement_group([{"GPU": 2.0}])
    try:
        assert holder.wait(30)
        pending([{"CPU": 1.0, "GPU": 1.0}])
        said = []
        waits = Waits(said.append)
        for now in (0.0, 2.0, 29.0):
            waits.look(now, _pending())
        assert said == []
        waits.look(31.0, _pending())
        assert len(said) == 1
        assert "other jobs hold the resources (1 CPU needed and " in said[0]
        assert "1 GPU needed and 0 free" in said[0]
    finally:
        remove_placement_group(holder)


@pytest.mark.full
def test_another_job_is_not_ours(cluster):
    """What another job of the cluster waits for is its own business."""
    code = (
        "import ray, sys; from ray.util import placement_group; ray.init(sys.argv[1], log_to_driver=False); "
        "placement_group([{'CPU': 1.0, 'GPU': 50.0}]); print('asked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, ray.get_runtime_context().gcs_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert any(line == "asked\n" for line in other.stdout)
        table = ray.util.placement_group_table().values()
        assert any(group["state"] == "PENDING" and group["bundles"][0]["GPU"] == 50 for group in table)
        assert _pending() == []
        other.communicate("", timeout=60)
