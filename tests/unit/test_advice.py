"""The advice in an error of the decision works: no error advises what another one refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import NetworkInfo, WorkerInfo
from ray_fracbackend.errors import FracBackendError, SharedDeviceError, StartTimeoutError, VerificationError
from ray_fracbackend.failure.explain import explain_nccl
from tests.unit.builders import worker
from tests.unit.test_plan_property import jobs

_ADVISED = re.compile(r"(backend|on_shared_device|on_missing_cuda)(?:=| to )((?:'[\w:,]+'(?: or )?)+)")


@st.composite
def lacking(draw: st.DrawFn) -> list[WorkerInfo]:
    """Generate random jobs, including CPU jobs, in which some or all ranks lack Gloo, a transport, ipc, staged or CUDA."""
    workers = draw(jobs())
    if draw(st.integers(0, 4)) == 0:
        workers = [worker(rank, platform=workers[0].platform) for rank in range(2)]
    lacks: dict[str, Any] = {
        "gloo_available": draw(st.booleans()),
        "staged_missing": draw(st.sampled_from([None, "no staged"])),
        "ipc_host_memory_missing": draw(st.sampled_from([None, "no ipc"])),
        "network": NetworkInfo(gloo_missing=draw(st.sampled_from([None, None, "no transport"]))),
    }
    if draw(st.integers(0, 3)) == 0:
        lacks |= {"devices": (), "cuda_missing": "no driver", "num_visible_devices": 0}
    if draw(st.integers(0, 3)) == 0:
        lacks["env"] = {"NCCL_NVLS_ENABLE": "1"}
    count = draw(st.sampled_from([1, len(workers)]))
    return [*(replace(each, **lacks) for each in workers[:count]), *workers[count:]]


def advised(text: str) -> list[dict[str, str]]:
    """Return the settings that a message advises, without those that it only quotes; the user's settings precede the cause."""
    advice = text.rpartition(". ")[2]
    return [{name: value} for name, values in _ADVISED.findall(advice) for value in re.findall(r"'([\w:,]+)'", values)]


def refusal(workers: list[WorkerInfo], chosen: Settings) -> str:
    """Return the error of the decision, empty if there is none."""
    try:
        decide_start(workers, chosen)
    except FracBackendError as error:
        return str(error)
    return ""


def starts(workers: list[WorkerInfo], chosen: Settings) -> bool:
    """Return whether the package accepts the start: the decision, and on Windows the trial of Gloo on CUDA tensors."""
    plan = decide_start(workers, chosen)
    on_windows = any(each.platform == "win32" for each in workers)
    return not (on_windows and plan.device_type == "cuda" and plan.backends.by_device.get("cuda") == "gloo")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    lacking(),
    st.sampled_from(["auto", "nccl", "gloo", "ipc", "staged", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:staged"]),
    st.sampled_from(["auto", "gloo", "nccl", "staged", "ipc", "error"]),
    st.sampled_from(["error", "cpu"]),
)
def test_advised_settings_start(workers, backend, policy, on_missing_cuda):
    """With each setting that a message advises the start succeeds, with all other settings unchanged."""
    chosen = Settings(backend=backend, on_shared_device=policy, on_missing_cuda=on_missing_cuda)
    if left_to_ray(backend, workers[0].resources):
        return
    text = refusal(workers, chosen)
    for advice in advised(text):
        assert starts(workers, replace(chosen, **advice)), text


# NCCL's messages for ranks on one GPU, for a hang, and for other errors.
FAILURES = [
    VerificationError(
        "all_reduce failed (ncclInvalidUsage).", advice="Look at the log.", ranks=(0,), kind="invalid_usage"
    ),
    SharedDeviceError(
        "NCCL refused ranks that share a GPU: Duplicate GPU detected.",
        advice="Give each a GPU.",
        ranks=(0, 1),
        kind="refused",
        cause="Duplicate GPU detected",
    ),
    VerificationError(
        "all_reduce failed (no answer within 9 s).", advice="Look at the log.", ranks=(0,), kind="stalled"
    ),
    StartTimeoutError("rank 1 did not answer.", advice="Look at it.", ranks=(1,)),
]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(lacking(), st.sampled_from(["auto", "nccl", "error"]), st.sampled_from(FAILURES))
def test_advised_settings_start_after_a_failure_of_nccl(workers, policy, failure):
    """The same is true for settings that are advised after NCCL has failed."""
    chosen = Settings(backend="nccl", on_shared_device=policy)
    if refusal(workers, chosen):
        return
    text = str(explain_nccl(failure, decide_start(workers, chosen), workers))
    for advice in advised(text):
        assert starts(workers, replace(chosen, **advice)), text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("backend='ipc', but no. Fix this, or use backend='auto'.", [{"backend": "auto"}]),
        (
            "x. Ask for more, or set on_shared_device to 'auto' or 'gloo'.",
            [{"on_shared_device": "auto"}, {"on_shared_device": "gloo"}],
        ),
        ("x. Correct it, or set FracTorchConfig(on_missing_cuda='cpu') to train.", [{"on_missing_cuda": "cpu"}]),
        ("on_shared_device='error' forbids it. Ask for more.", []),
    ],
)
def test_the_reading_of_messages(text, found):
    """Settings are found in the last sentence."""
    assert advised(text) == found
