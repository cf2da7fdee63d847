"""Properties of a ScalingConfig and a cluster with FracTorchConfig: two trainers at once, in threads of one process.

Uses the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import ray.train
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_fracbackend import FracTorchConfig
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.worker.network import interfaces
from tests.processes import loopback_name, wait_until
from tests.ray.conftest import HALF_GPU

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

_MEET_S = 200.0
_NUM_ROWS = 12
# Any name of this machine except loopback's, which is also our choice.
_INTERFACE = next((name for name in interfaces() if name != loopback_name()), None)
_VARIABLES = {"NCCL_SOCKET_IFNAME": "^docker0", **({"GLOO_SOCKET_IFNAME": _INTERFACE} if _INTERFACE else {})}
# Only V1 reserves something for the trial that the trainer runs in.
_TRAINER = {} if v2_enabled() else {"trainer_resources": {"CPU": 1, "licence": 1}}


def train_func(config):
    """Wait until both runs train, sum the rows of all shards, and write the result."""
    import os

    import torch
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    folder, rank = Path(config["folder"]), dist.get_rank()
    (folder / f"{config['name']}-{rank}.here").touch()
    end = time.monotonic() + _MEET_S
    while len(list(folder.glob("*-0.here"))) < 2:
        assert time.monotonic() < end, "the two runs never train at one time"
        time.sleep(0.1)
    rows = [row["id"] for row in ray.train.get_dataset_shard("train").iter_rows()] if config["with_data"] else [rank]
    total = torch.tensor([float(sum(rows)), len(rows)])
    dist.all_reduce(total)
    found = {
        "rows": rows,
        "total": total.tolist(),
        "pid": os.getpid(),
        "devices": [str(device) for device in ray.train.torch.get_devices()],
        "device": str(ray.train.torch.get_device()),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "bundles": ray.util.get_current_placement_group().bundle_specs,
        "report": get_start_report().to_dict(),
    }
    (folder / f"{config['name']}-{rank}.json").write_text(json.dumps(found))


def make_trainer(name, folder, scaling_config, datasets=None):
    return TorchTrainer(
        train_func,
        train_loop_config={"name": name, "folder": str(folder), "with_data": datasets is not None},
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),
        scaling_config=scaling_config,
        datasets=datasets,
        run_config=RunConfig(name=name, storage_path=str(folder)),
    )


@pytest.fixture(scope="module")
def jobs(no_cluster, tmp_path_factory):
    """Return every rank's result, by the name of its run."""
    folder = tmp_path_factory.mktemp("jobs")
    ray.init(
        "local",
        num_cpus=12,
        num_gpus=5,
        resources={"licence": 3, "accelerator_type:A100": 1},
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": _VARIABLES},
    )
    halves = ScalingConfig(
        num_workers=2,
        use_gpu=True,
        resources_per_worker={**HALF_GPU, "licence": 1},
        accelerator_type="A100",
        **_TRAINER,
    )
    pairs = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 2})
    trainers = [
        make_trainer("halves", folder, halves, datasets={"train": ray.data.range(_NUM_ROWS)}),
        make_trainer("pairs", folder, pairs),
    ]
    with ThreadPoolExecutor(len(trainers)) as pool:
        runs = [pool.submit(trainers[0].fit)]
        if not v2_enabled():
            # V1's Tune keeps trainables in a dictionary without a lock, so two fits must not start in the same instant.
            wait_until(lambda: (folder / "halves-0.here").exists() or runs[0].done(), _MEET_S)
        runs.append(pool.submit(trainers[1].fit))
        for run in runs:
            run.result()
    return {
        name: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]
        for name in ("halves", "pairs")
    }


def test_two_trainers_side_by_side(jobs):
    """Each trainer has its own group: other workers, another port, and sums of only its own ranks."""
    assert {name: len(ranks) for name, ranks in jobs.items()} == {"halves": 2, "pairs": 2}
    assert [rank["total"] for rank in jobs["pairs"]] == [[1.0, 2.0]] * 2
    ports = {rank["report"]["master_port"] for ranks in jobs.values() for rank in ranks}
    assert len(ports) == 2
    for ranks in jobs.values():
        assert [worker["pid"] for worker in ranks[0]["report"]["workers"]] == [rank["pid"] for rank in ranks]
    assert len({rank["pid"] for ranks in jobs.values() for rank in ranks}) == 4


def test_dataset_shards(jobs):
    """Every row of a Ray Data dataset is in one rank's shard."""
    assert sorted(row for rank in jobs["halves"] for row in rank["rows"]) == list(range(_NUM_ROWS))
    assert [rank["total"] for rank in jobs["halves"]] == [[_NUM_ROWS * (_NUM_ROWS - 1) / 2, _NUM_ROWS]] * 2


def test_resources(jobs):
    """Custom resources and an accelerator type are reserved for every worker; V1 adds the trainer's own."""
    first, second = jobs["halves"][0]["bundles"]
    # V1 puts the trainer into the first worker's bundle.
    assert (first["licence"], second["licence"]) == (1 if v2_enabled() else 2, 1)
    assert [bundle["accelerator_type:A100"] for bundle in (first, second)] == [0.001] * 2
    assert [worker["resources"]["GPU"] for worker in jobs["halves"][0]["report"]["workers"]] == [0.5] * 2


def test_two_gpus_a_worker(jobs):
    """Ray assigns two ids to each worker; on the CPU get_devices() returns one cpu, whatever was reserved."""
    workers = jobs["pairs"][0]["report"]["workers"]
    assert [(worker["resources"]["GPU"], len(worker["gpu_ids"])) for worker in workers] == [(2.0, 2)] * 2
    assert not set(workers[0]["gpu_ids"]) & set(workers[1]["gpu_ids"])
    assert [(rank["device"], rank["devices"]) for rank in jobs["pairs"]] == [("cpu", ["cpu"])] * 2


def test_variables_of_the_runtime_env(jobs):
    """NCCL's and Gloo's interfaces of a runtime_env reach the workers, take precedence over ours, and are in the report."""
    for ranks in jobs.values():
        assert [rank["variables"] for rank in ranks] == [_VARIABLES] * 2
        assert [worker["env"].items() >= _VARIABLES.items() for worker in ranks[0]["report"]["workers"]] == [True] * 2
        if _INTERFACE:
            assert f"Gloo over {_INTERFACE} as set by the user" in ranks[0]["report"]["rendezvous"]["reason"]
            assert ranks[0]["report"]["rendezvous"]["warnings"] == []
