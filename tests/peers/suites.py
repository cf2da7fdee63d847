"""The suites by project. Stock's side is first."""

from __future__ import annotations

from tests.peers.runner import Suite

_GLOO_AND_IPC = {
    "gloo": {"PEERS_TORCH": "gloo", "BACKEND": "gloo"},
    "ipc": {"PEERS_TORCH": "ipc", "BACKEND": "ipc"},
}
_CONFIGS = ("TorchConfig", "FracTorchConfig", "FracTorchConfig ipc")
# torch's helpers for tests read it when they are imported.
_TORCH = {"RES_OPTIONS": "timeout:1", "WORLD_SIZE": "2"}


def _distributed(ranks: int) -> Suite:
    name = f"DistributedTest, {ranks} ranks"
    return Suite(name, "torch", "torch_distributed.py", "", _GLOO_AND_IPC, env={**_TORCH, "WORLD_SIZE": str(ranks)})


def _of_torch(*files: str, select: tuple[str, ...] = ()) -> Suite:
    paths = tuple(f"test/distributed/{file}" for file in files)
    return Suite(files[0].removesuffix(".py"), "torch", paths, "TORCH_CHECKOUT", _GLOO_AND_IPC, select, _TORCH)


# Inside the wheel of torch.
WHEEL = (
    *(_distributed(ranks) for ranks in (2, 3, 4)),
    Suite("DDP with RPC", "torch", "torch_ddp_rpc.py", "", _GLOO_AND_IPC, env=_TORCH),
)
# Only in torch's repository. Left out: tests that need GPUs (DDP's hooks, pipelining, NCCL's own) or torch's group of threads, which
# reaches no backend (FSDP2's).
TORCH = (
    _of_torch("test_c10d_gloo.py"),
    _of_torch("test_c10d_common.py"),
    # The others use torch's group of threads, which sometimes hangs. Tests that Inductor compiles take minutes.
    _of_torch("test_functional_api.py", select=("-k", "(WithNCCL or WorldSize4) and not inductor")),
    _of_torch("test_c10d_object_collectives.py"),
    _of_torch("test_c10d_spawn_gloo.py"),
    _of_torch("test_device_mesh.py"),
    _of_torch("algorithms/test_join.py"),
    _of_torch("optim/test_zero_redundancy_optimizer.py"),
    _of_torch("tensor/test_redistribute.py", "_tensor/test_redistribute.py"),
    _of_torch("tensor/test_tensor_ops.py", "_tensor/test_tensor_ops.py"),
    _of_torch("_composable/test_replicate.py"),
    _of_torch("checkpoint/test_file_system_checkpoint_cpu.py"),
    _of_torch("checkpoint/test_utils.py"),
    _of_torch("checkpoint/e2e/test_e2e_save_and_load.py"),
)


def _of_ray(engine: str, file: str, select: str, sides: tuple[str, ...] = _CONFIGS) -> Suite:
    v2 = engine == "V2"
    env = {
        "RES_OPTIONS": "timeout:1",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # One process fewer per run.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_V2_ENABLED": str(int(v2)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    path = f"python/ray/train/{'v2/' if v2 else ''}tests/{file}.py"
    variables = {side: {"PEERS_RAY": side} for side in sides}
    # V1's conftest.py needs boto3, but only for tests that are not listed here.
    return Suite(f"{file}, {engine}", "Ray", path, "RAY_CHECKOUT", variables, ("-k", select), env, plugins=v2)


# Left out: tests that need GPUs or other packages, units that start no worker, local mode, which never calls a backend, and
# test_elastic_e2e, which needs 32 workers with a GPU each.
RAY = (
    _of_ray("V2", "test_torch_trainer", "not torchft and not nccl"),
    _of_ray("V2", "test_lightning_integration", "ddp"),
    _of_ray("V2", "test_result", "restore and (False-True-str or True-False-PathLike)", _CONFIGS[:2]),
    _of_ray("V2", "test_persistence", "config0-custom_fs"),
    _of_ray("V2", "test_collective", "test_"),
    _of_ray("V2", "test_data_integration", "sharding_across or context_propagation"),
    _of_ray("V2", "test_data_parallel_trainer", "output or checkpoint or error or directory or sigint"),
    _of_ray(
        "V1",
        "test_torch_trainer",
        "(test_torch_linear and 2) or (state_dict and True) or session_errors or single_worker or (torch_amp and not custom) or env_vars",
    ),
    # Its tests name Gloo.
    _of_ray("V1", "test_backend", "torch", _CONFIGS[:2]),
    _of_ray("V1", "test_training_iterator", "torch"),
)
ALL = (*WHEEL, *TORCH, *RAY)
