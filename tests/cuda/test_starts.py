"""Starts in Ray on the emulated CUDA runtime: typical scripts on machines of many shapes, compared with stock."""

from __future__ import annotations

import pytest

from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from ray_fracbackend.decide.error_texts import is_invalid_usage, refusal_in
from tests.cuda.emulated import uuid, workers
from tests.gpu.gpu_engine import Engine

TWO_HALVES = workers(2, 0.5)


@pytest.fixture
def machine(tmp_path):
    """Start Ray on a separate machine with this number of devices; it ends with the test."""
    engines = []

    def start(num_devices=1, version="v2", num_gpus=None, **env):
        state = tmp_path / f"machine{len(engines)}"
        state.mkdir()
        shape = {"CUDA_RIG_DEVICES": str(num_devices), "CUDA_RIG_STATE": str(state)}
        # Ray starts a worker for each CPU at once.
        shape["GPU_TESTS_NUM_CPUS"] = "6"
        engines.append(Engine(version, num_gpus=num_gpus or num_devices, **{**shape, **env}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def ranks_of(answer, expected):
    """Return the ranks' results of a run, after checking that they trained as one process with checkpoints of all ranks."""
    assert answer["errors"] == []
    ranks = answer["ranks"]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, rel=1e-4)
        assert rank["spread"] == 0
        assert rank["files"] == [f"rank{number}.pt" for number in range(len(ranks))]
    assert ranks[0]["report"]["verification"]["device"] == ranks[0]["device"]
    return ranks


def groups_of(rank):
    """Return ranks that share a device, as detected by the start."""
    return [group["ranks"] for group in rank["report"]["plan"]["share_groups"]]


@pytest.mark.parametrize(
    ("nccl", "version"),
    [("2.18.5", "v2"), ("2.21.5", "v2"), ("2.28.9", "v1"), ("2.28.9", "v2"), ("2.30.7", "v2")],
)
def test_the_first_seed(machine, expected, nccl, version):
    """With two workers at half a GPU stock ends in NCCL's refusal with the message of its version, and ours trains.

    NCCL 2.30 accepts several ranks on one device with the flags that the start sets.
    """
    engine = machine(1, version, CUDA_RIG_NCCL=nccl)
    for policy in ("auto", *{"2.28.9": ("staged", "ipc"), "2.30.7": ("nccl",)}.get(nccl, ())):
        answer = engine.run("shape", settings={"on_shared_device": policy}, scaling=TWO_HALVES)
        ranks = ranks_of(answer, expected)
        assert {rank["device"] for rank in ranks} == {"cuda:0"}
        wanted = "gloo" if policy == "auto" else policy
        assert {rank["backend"].removeprefix("cpu:gloo,cuda:") for rank in ranks} == {wanted}
        assert groups_of(ranks[0]) == [[0, 1]]
        assert ranks[0]["check"] == ["nccl" if policy == "nccl" else "gloo", [[0, 1]]]
        env_defaults = ranks[0]["report"]["plan"]["env_defaults"]
        assert env_defaults.get("NCCL_MULTI_RANK_GPU_ENABLE") == ("1" if policy == "nccl" else None)
    stock = engine.run("shape", stock=True, scaling=TWO_HALVES)  # the last: with torch 2.15 its workers stay alive
    text = "\n".join(error["text"] for error in stock["errors"])
    assert is_invalid_usage(text)
    if not CONNECTS_NCCL_AT_ONCE:  # torch 2.15 does not pass the reason on
        refused = "Multiple Ranks are using the same GPU/Partition" if nccl == "2.30.7" else "Duplicate GPU detected : "
        assert refused in text
        assert refusal_in(text)


# Devices of the machine, the workers, the backend, the ranks that share a device, and devices of each worker.
SHAPES = {
    "a GPU each": (2, {"num_workers": 2, "use_gpu": True}, "nccl", [], 1),
    "two GPUs each": (4, workers(2, 2), "nccl", [], 2),
    "two on each of two": (2, workers(4, 0.5), "gloo", [[0, 1], [2, 3]], 1),
    "one worker at half": (1, workers(1, 0.5), "nccl", [], 1),
    "three at a third": (1, workers(3, 0.33), "gloo", [[0, 1, 2]], 1),
    "two thirds and packing": (2, workers(2, 0.6, placement_strategy="PACK"), "nccl", [], 1),
    "strictly packed halves": (2, workers(2, 0.5, placement_strategy="STRICT_PACK"), "gloo", [[0, 1]], 1),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape_of_a_scaling_config(machine, expected, case):
    """NCCL if each worker has its own devices, Gloo if some share them, and get_devices() returns the requested number.

    The train function's own check has the same result.
    """
    num_devices, scaling, backend, groups, num_own = SHAPES[case]
    ranks = ranks_of(machine(num_devices).run("shape", scaling=scaling), expected)
    assert {rank["backend"] for rank in ranks} == {backend}
    assert groups_of(ranks[0]) == groups
    for rank in ranks:
        assert len(rank["devices"]) == num_own
        assert rank["device"] == rank["devices"][0]
        assert rank["current"] == int(rank["device"].partition(":")[2])
        assert rank["check"] == [backend, groups]


@pytest.mark.parametrize("settings", [{}, {"backend": "gloo"}, {"backend": "ipc"}])
def test_workers_without_gpus_train_on_the_cpu(machine, expected, settings):
    """Ray leaves the GPU visible to them, although none was requested."""
    answer = machine(1).run("shape", settings=settings, scaling={"num_workers": 2})
    ranks = ranks_of(answer, expected)
    assert {rank["device"] for rank in ranks} == {"cpu"}
    assert {rank["backend"] for rank in ranks} == {settings.get("backend", "gloo")}


@pytest.mark.parametrize("visible", ["2,3", f"{uuid(3)},{uuid(1)}", uuid(2)[:12]])
def test_restricted_visible_devices(machine, expected, visible):
    """Indices, UUIDs and UUID prefixes in CUDA_VISIBLE_DEVICES: the devices are identified by CUDA's own UUIDs."""
    names = visible.split(",")
    scaling = {"num_workers": len(names), "use_gpu": True}
    if len(names) == 1:
        scaling = TWO_HALVES
    engine = machine(4, num_gpus=len(names), CUDA_VISIBLE_DEVICES=visible)
    ranks = ranks_of(engine.run("shape", scaling=scaling), expected)
    found = {worker["devices"][0]["uuid"] for worker in ranks[0]["report"]["workers"]}
    wanted = {
        uuid(int(name)) if name.isdecimal() else next(uuid(i) for i in range(4) if uuid(i).startswith(name))
        for name in names
    }
    assert found == wanted
    assert {rank["backend"] for rank in ranks} == {"nccl" if len(names) > 1 else "gloo"}


SLICES = [uuid(0, number) for number in range(2)]


@pytest.mark.parametrize(("nccl", "nvml"), [("2.28.9", ""), ("2.28.9", "no_nvml"), ("2.30.7", "")])
def test_mig_slices_of_one_gpu(machine, expected, nccl, nvml):
    """A list of slices, one for each worker: they share nothing, but an NCCL that compares PCI bus ids refuses them.

    CUDA reports these too, so the refusal is known without NVML.
    """
    mig = {"CUDA_RIG_MIG": "2", "CUDA_VISIBLE_DEVICES": ",".join(SLICES), "CUDA_RIG_NCCL": nccl, "CUDA_RIG_FAULT": nvml}
    # Otherwise Ray gives each worker the whole list, of which CUDA shows only the first slice.
    engine = machine(1, num_gpus=2, TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES="0", **mig)
    ranks = ranks_of(engine.run("shape", scaling={"num_workers": 2, "use_gpu": True}), expected)
    assert {worker["devices"][0]["uuid"] for worker in ranks[0]["report"]["workers"]} == set(SLICES)
    # Ranks that NCCL treats as ranks on one device, or none.
    assert groups_of(ranks[0]) == ([] if nccl == "2.30.7" else [[0, 1]])
    assert {rank["backend"] for rank in ranks} == {"nccl" if nccl == "2.30.7" else "gloo"}


def test_a_list_of_slices_that_workers_share(machine):
    """Without the variable above the error names it."""
    engine = machine(1, num_gpus=2, CUDA_RIG_MIG="2", CUDA_VISIBLE_DEVICES=",".join(SLICES))
    answer = engine.run("shape", scaling={"num_workers": 2, "use_gpu": True})
    assert "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0" in str(answer["errors"])


def test_two_workers_in_one_mig_slice(machine, expected):
    """They share the slice, and both can map its memory."""
    engine = machine(1, CUDA_RIG_MIG="2", CUDA_VISIBLE_DEVICES=SLICES[1])
    ranks = ranks_of(engine.run("shape", scaling=TWO_HALVES, settings={"on_shared_device": "ipc"}), expected)
    (group,) = ranks[0]["report"]["plan"]["share_groups"]
    assert (group["ranks"], group["device_uuid"]) == ([0, 1], SLICES[1])
