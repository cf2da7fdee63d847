"""Starts in Ray whose NCCL hangs, fails late or refuses: they end in time with the reason, or fall back; and the next job works."""

from __future__ import annotations

import re
from contextlib import closing

import pytest
import ray
from packaging.version import Version

from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from tests.cuda.emulated import workers
from tests.gpu.gpu_engine import Engine
from tests.processes import shared_files, wait_until

START_S = 20.0
OVER_S = 10.0
OWN = {"num_workers": 2, "use_gpu": True}
HALVES = workers(2, 0.5, placement_strategy="STRICT_PACK")
# torch's watchdog ends its process seconds after a timeout, not a minute.
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
NVLS = {**MULTI_RANK, "NCCL_NVLS_ENABLE": "1"}
# torch 2.15 connects NCCL when the group is made. Its watchdog ends a process after an error too, by default 15 s later.
SLOW_WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
FIRST_STEP = "creating the nccl process group" if CONNECTS_NCCL_AT_ONCE else "barrier"
LATE_ERROR = "NCCL operation failed" if CONNECTS_NCCL_AT_ONCE else "Call to recv failed"
# Of torch 2.14; torch 2.7 has no such flag.
NCCL = {"CUDA_RIG_NCCL": "2.30.7"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One Ray with the V2 engine and two GPUs; a fault affects only the workers of one job."""
    state = tmp_path_factory.mktemp("machine")
    started = Engine("v2", num_gpus=2, CUDA_RIG_DEVICES="2", CUDA_RIG_STATE=str(state), **NCCL)
    yield started
    started.close()


def run(engine, scaling, fault="", env=WATCHDOG, **settings):
    """Run a job whose workers have a fault; return the ranks' results and the error messages."""
    variables = {**env, **({"CUDA_RIG_FAULT": fault} if fault else {})}
    settings = {"start_timeout_s": START_S, **settings}
    answer = engine.run("shape", 200.0, scaling=scaling, settings=settings, worker_env=variables)
    text = "\n".join(error["text"] for error in answer["errors"])
    print(
        f"{fault or 'no fault'}, {settings}: {text or [rank['report']['plan']['warnings'] for rank in answer['ranks'][:1]]}"
    )
    return answer["ranks"], text


def trained(ranks, expected, backend):
    """Check that all ranks trained as one process does; return the start's report."""
    assert [rank["backend"] for rank in ranks] == [backend] * 2
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, rel=1e-4)
        assert rank["spread"] == 0
    return ranks[0]["report"]


# Job, fault, variables, settings, and parts of the error.
ENDINGS = {
    "init hangs": (OWN, "nccl_init_hang", {}, {}, (FIRST_STEP, " failed", "(no answer within ", "NCCL hangs")),
    "hangs": (OWN, "nccl_hang=1", {}, {}, ("barrier failed on rank 0 after ", "(no answer within ")),
    "hangs later": (OWN, "nccl_hang=6", {}, {}, ("all_reduce of 1 MiB failed on rank 1 after ", "(no answer within ")),
    "refuses": (OWN, "nccl_refuse=1", {}, {}, ("rank 1 (node ", f"{FIRST_STEP} ", " failed", "Call to socket failed")),
    "no memory": (OWN, "nccl_oom=1", {}, {}, ("rank 1 (node ", "out of memory", "End other processes")),
    "late error": (OWN, "nccl_late_error=1", SLOW_WATCHDOG, {}, ("barrier failed on rank 0", LATE_ERROR)),
    "abort hangs": (
        HALVES,
        "nccl_hang=1,nccl_abort_hang",
        MULTI_RANK,
        {},
        ("its abort failed, or hangs for more than 5 s. Restart the worker",),
    ),
    # on_shared_device="error" also forbids sharing that only NCCL detects.
    "sharing": (OWN, "nccl_duplicate", {}, {"on_shared_device": "error"}, ("refused the start",)),
    # No fallback from an explicit choice: the error states NCCL's requirements.
    "chosen, hangs": (
        HALVES,
        "nccl_hang=1",
        {},
        {"on_shared_device": "nccl"},
        ("no answer within", "NCCL_MAX_CTAS", "backend='gloo'"),
    ),
    "chosen, NVLS": (
        HALVES,
        "",
        NVLS,
        {"on_shared_device": "nccl"},
        ("The user set NCCL_NVLS_ENABLE=1, which was kept: unset it",),
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_start_that_fails(engine, case):
    """It ends in time with rank, node, step, cause and advice, and leaves no process and no file."""
    scaling, fault, env, settings, parts = ENDINGS[case]
    before = shared_files()
    ranks, text = run(engine, scaling, fault, {**WATCHDOG, **env}, **settings)
    assert ranks == []
    assert [part for part in parts if part not in text] == []
    assert "not in it" not in text
    # The whole time limit, or an attempt's before a fallback, minus what came before on a busy machine.
    limit_s = START_S / 4 if "fell back" in text else START_S
    limit_s += "creating the nccl" in text  # a second in which c10d would raise its own error
    assert all(limit_s - 3 < float(seconds) <= limit_s for seconds in re.findall(r"no answer within ([\d.]+) s", text))
    assert engine.start_report()["seconds"]["start"] < START_S + OVER_S
    assert wait_until(lambda: not engine.train_workers(), 15)
    assert {name for name in shared_files() - before if "ray_fracbackend" in name} == set()


def test_a_collective_that_hangs_in_training(engine):
    """torch's watchdog ends the rank after timeout_s, and fit() reports it, or a call between its abort and that end."""
    ranks, text = run(engine, OWN, "nccl_hang=20", timeout_s=5)
    assert ranks == []
    assert "died" in text or "NCCL communicator was aborted" in text
    assert wait_until(lambda: not engine.train_workers(), 15)


# Without WATCHDOG: see test_the_group_after_one_that_failed. Job, fault, variables, and a part of the warning.
FALLBACKS = {
    # NCCL may detect a shared device that nothing else detects.
    "ranks that share nothing": (OWN, "nccl_duplicate", WATCHDOG, "Multiple Ranks are using the same GPU"),
    # The multi-rank NCCL that the user's variable enables.
    "hang": (HALVES, "nccl_hang=1", MULTI_RANK, "no answer within"),
    "late error": (HALVES, "nccl_late_error=1", MULTI_RANK, LATE_ERROR),
    "no memory for NCCL": (HALVES, "nccl_oom=1", MULTI_RANK, "out of memory"),
    "one rank fails": (HALVES, "nccl_refuse=1", MULTI_RANK, "Call to socket failed"),
    "NVLS of the user's": (HALVES, "", NVLS, "NCCL_NVLS_ENABLE"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_gloo_where_nccl_fails(engine, expected, case):
    """With auto it still trains, to the loss of one process, and warns with the cause."""
    scaling, fault, env, cause = FALLBACKS[case]
    ranks, text = run(engine, scaling, fault, env)
    assert text == ""
    warnings = "\n".join(trained(ranks, expected, "gloo")["plan"]["warnings"])
    assert ", fell back to gloo" in warnings
    assert cause in warnings
    assert engine.start_report()["seconds"]["start"] < START_S + OVER_S


def test_the_same_ray_goes_on(engine, expected):
    """After all of these the next job uses NCCL on both devices, bound to them."""
    ranks, text = run(engine, OWN)
    assert text == ""
    trained(ranks, expected, "nccl")
    assert [(rank["bound"], rank["new_group"]) for rank in ranks] == [(True, 2.0)] * 2
    assert engine.start_report()["verification"]["device"].startswith("cuda:")


@pytest.mark.parametrize("fault", ["nccl_late_error=1", "nccl_hang=1"])
def test_fallback_under_v1(tmp_path, expected, fault):
    """The same in the other engine."""
    state = {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_STATE": str(tmp_path), "CUDA_RIG_FAULT": fault}
    with closing(Engine("v1", **state, **NCCL, **MULTI_RANK)) as engine:
        answer = engine.run("shape", 200.0, scaling=HALVES, settings={"start_timeout_s": START_S})
    assert answer["errors"] == []
    report = trained(answer["ranks"], expected, "gloo")
    assert "nccl failed its verification, fell back to gloo" in "\n".join(report["plan"]["warnings"])


@pytest.mark.skipif(CONNECTS_NCCL_AT_ONCE, reason="torch 2.15 uses the device with the number LOCAL_RANK at once")
@pytest.mark.skipif(
    Version(ray.__version__) < Version("2.60"),
    reason=f"needs a Ray that leaves GPUs to CPU workers: {ray.__version__} hides them",
)
def test_a_pair_with_nccl_on_workers_without_gpus(engine, expected):
    """Ray assigned them no GPU, so none is used before the script does, as with stock: they train on the CPU."""
    ranks, text = run(engine, {"num_workers": 2}, env={"CUDA_VISIBLE_DEVICES": "0"}, backend="cpu:gloo,cuda:nccl")
    assert text == ""
    trained(ranks, expected, "cpu:gloo,cuda:nccl")
    assert {rank["device"] for rank in ranks} == {"cpu"}
    assert engine.start_report()["verification"]["device"] == "cpu"
