"""Starts in Ray whose NCCL hangs, fails late or refuses: they end in time with the reason, or fall back; and the next job works."""

from __future__ import annotations

import re
import time

import pytest
import ray
from packaging.version import Version

from tests.cuda.emulated import needs_rig, uuid
from tests.gpu.gpu_engine import Engine
from tests.gpu.gpu_training import losses_of_one_process
from tests.processes import shared_files

pytestmark = needs_rig

START_S = 20.0
OVER_S = 10.0
OWN = {"num_workers": 2, "use_gpu": True}
HALVES = {
    "num_workers": 2,
    "use_gpu": True,
    "resources_per_worker": {"CPU": 1, "GPU": 0.5},
    "placement_strategy": "STRICT_PACK",
}
# torch's watchdog ends its process seconds after a timeout, not a minute.
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
# Of torch 2.14; torch 2.7 has no such flag.
NCCL = {"CUDA_RIG_NCCL": "2.30.7"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One Ray with the V2 engine and two GPUs; a fault affects only the workers of one job."""
    state = tmp_path_factory.mktemp("machine")
    started = Engine("v2", num_gpus=2, CUDA_RIG_DEVICES="2", CUDA_RIG_STATE=str(state), **NCCL)
    yield started
    started.close()


@pytest.fixture(scope="module")
def expected():
    """Return the losses of one process with the whole batches."""
    return losses_of_one_process("cuda")


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


def gone(engine):
    """Wait until no worker process is left."""
    end = time.monotonic() + 15
    while (left := engine.train_workers()) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == []


ENDINGS = {
    "nccl_init_hang": ("barrier failed on rank 0 after 20", "(no answer within "),
    "nccl_hang=1": ("barrier failed on rank 0 after 20", "(no answer within "),
    "nccl_hang=9": ("all_reduce of 1 MiB failed on rank 1 after ", "(no answer within "),
    "nccl_refuse=1": (
        "rank 1 (node ",
        "barrier failed on rank 1",
        "Call to socket failed",
        "NCCL fails on that rank itself",
    ),
    "nccl_oom=1": ("rank 1 (node ", "ran out of device memory during start-up", "out of memory", "End other processes"),
    "nccl_late_error=1": ("barrier failed on rank 0", "Call to recv failed", "NCCL fails on that rank itself"),
}


@pytest.mark.parametrize("fault", ENDINGS)
def test_a_start_that_fails_on_devices_of_its_own(engine, fault):
    """It ends in time with rank, node, step, cause and advice, and leaves no process and no file."""
    before = shared_files()
    ranks, text = run(engine, OWN, fault)
    assert ranks == []
    for part in ENDINGS[fault]:
        assert part in text
    assert "not in it" not in text
    # The whole time limit, minus what came before on a busy machine.
    assert all(START_S - 3 < float(seconds) <= START_S for seconds in re.findall(r"no answer within ([\d.]+) s", text))
    assert engine.start_report()["seconds"]["start"] < START_S + OVER_S
    gone(engine)
    assert {name for name in shared_files() - before if "ray_fracbackend" in name} == set()


@pytest.mark.parametrize("policy", ["auto", "gloo"])
def test_gloo_where_nccl_refuses_ranks_that_share_nothing(engine, expected, policy):
    """NCCL may detect a shared device that nothing else detects: then the job trains with Gloo and a warning."""
    ranks, text = run(engine, OWN, "nccl_duplicate", on_shared_device=policy)
    assert text == ""
    report = trained(ranks, expected, "gloo")
    (warning,) = report["plan"]["warnings"]
    assert "NCCL refused the ranks, fell back to gloo" in warning
    assert "Multiple Ranks are using the same GPU" in warning


def test_an_error_where_the_policy_is_one(engine):
    """on_shared_device='error' also forbids sharing that only NCCL detects."""
    ranks, text = run(engine, OWN, "nccl_duplicate", on_shared_device="error")
    assert ranks == []
    assert "refused the start" in text
    gone(engine)


def test_a_collective_that_hangs_in_training(engine):
    """torch's watchdog ends the rank after timeout_s, and fit() reports it."""
    ranks, text = run(engine, OWN, "nccl_hang=20", timeout_s=5)
    assert ranks == []
    assert "died" in text
    gone(engine)


def test_the_same_ray_goes_on(engine, expected):
    """After all of these the next job uses NCCL on both devices, bound to them."""
    ranks, text = run(engine, OWN)
    assert text == ""
    trained(ranks, expected, "nccl")
    assert [(rank["bound"], rank["new_group"]) for rank in ranks] == [(True, 2.0)] * 2
    assert engine.start_report()["verification"]["device"].startswith("cuda:")


# Without WATCHDOG: see test_the_group_after_one_that_failed.
# The multi-rank NCCL that the user's variable enables, and its result.
FALLBACKS = {
    "hang": ("nccl_hang=1", "no answer within"),
    "late error": ("nccl_late_error=1", "Call to recv failed"),
    "no memory for NCCL": ("nccl_oom=1", "out of memory"),
    "one rank fails": ("nccl_refuse=1", "Call to socket failed"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_gloo_where_the_users_flags_fail(engine, expected, case):
    """With auto it still trains, to the loss of one process, and warns with the cause."""
    fault, cause = FALLBACKS[case]
    ranks, text = run(engine, HALVES, fault, MULTI_RANK)
    assert text == ""
    report = trained(ranks, expected, "gloo")
    warnings = "\n".join(report["plan"]["warnings"])
    assert ", fell back to gloo" in warnings
    assert cause in warnings
    assert engine.start_report()["seconds"]["start"] < START_S + OVER_S


def test_flags_of_the_users_that_nccl_refuses(engine, expected):
    """NVLS with several ranks on a GPU: Gloo as the fallback with auto, and an error if NCCL was requested."""
    env = {**MULTI_RANK, "NCCL_NVLS_ENABLE": "1"}
    ranks, text = run(engine, HALVES, env=env)
    assert text == ""
    plan = trained(ranks, expected, "gloo")["plan"]
    assert "fell back to gloo" in plan["warnings"][-1]
    ranks, text = run(engine, HALVES, env=env, on_shared_device="nccl")
    assert ranks == []
    assert "The user set NCCL_NVLS_ENABLE=1, which was kept: unset it" in text


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("nccl_hang=1", ("no answer within", "set NCCL_MAX_CTAS lower", "backend='gloo'")),
        ("nccl_refuse=1", ("rank 1 (node ", "Call to socket failed")),
    ],
)
def test_no_fallback_from_an_explicit_choice(engine, fault, parts):
    """on_shared_device="nccl" ends in an error that states NCCL's requirements."""
    ranks, text = run(engine, HALVES, fault, on_shared_device="nccl")
    assert ranks == []
    for part in parts:
        assert part in text
    assert engine.start_report()["seconds"]["start"] < START_S + OVER_S
    gone(engine)


@pytest.mark.parametrize("fault", ["nccl_late_error=1", "nccl_hang=1"])
def test_fallback_under_v1(tmp_path, expected, fault):
    """The same in the other engine."""
    state = {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_STATE": str(tmp_path), "CUDA_RIG_FAULT": fault}
    engine = Engine("v1", **state, **NCCL, **MULTI_RANK)
    try:
        answer = engine.run("shape", 200.0, scaling=HALVES, settings={"start_timeout_s": START_S})
    finally:
        engine.close()
    assert answer["errors"] == []
    report = trained(answer["ranks"], expected, "gloo")
    assert "nccl failed its verification, fell back to gloo" in "\n".join(report["plan"]["warnings"])


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


def test_slices_that_an_old_nccl_refuses_are_known_without_nvml(tmp_path, expected):
    """NCCL 2.28.9 compares PCI bus ids, which CUDA also reports: Gloo from the start."""
    visible = f"{uuid(0, 0)},{uuid(0, 1)}"
    machine = {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_MIG": "2", "CUDA_VISIBLE_DEVICES": visible, "CUDA_RIG_NCCL": "2.28.9"}
    # A process sees at most one slice, so each worker needs its own list.
    own = {"TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0", "CUDA_RIG_FAULT": "no_nvml"}
    engine = Engine("v2", num_gpus=2, CUDA_RIG_STATE=str(tmp_path), **machine, **own)
    try:
        answer = engine.run("shape", 200.0, scaling=OWN, settings={"start_timeout_s": START_S})
    finally:
        engine.close()
    text = "\n".join(error["text"] for error in answer["errors"])
    assert text == ""
    trained(answer["ranks"], expected, "gloo")
