"""Options that change nothing, and the reasons. Pure."""

from __future__ import annotations

import pytest

from ray_fracbackend.cli.no_effect import without_effect

_GPU_OPTIONS = {"on_shared_device": "ipc", "on_missing_cuda": "cpu", "limit_gpu_memory": True}
# Settings of the command line, backend, GPUs per worker, lines.
_CASES = {
    "CPU workers": (
        {**_GPU_OPTIONS, "verify": False},
        "auto",
        0,
        ["--on-shared-device, --on-missing-cuda, --limit-gpu-memory: no effect, because the workers request no GPU"],
    ),
    "parts of a GPU": (_GPU_OPTIONS, "auto", 0.5, []),
    "whole GPUs": (
        _GPU_OPTIONS,
        "auto",
        2,
        ["--limit-gpu-memory: no effect, because workers with whole GPUs have no limit"],
    ),
    "a backend by name": (
        _GPU_OPTIONS,
        "gloo",
        0.5,
        ["--on-shared-device: no effect, because backend 'gloo' is set explicitly"],
    ),
    "it may be refused": ({"on_shared_device": "error"}, "gloo", 0.5, []),
    "NCCL by name": (_GPU_OPTIONS, "cpu:gloo,cuda:nccl", 0.5, []),
    "a backend of Ray's": (
        {"backend": "ucc", "timeout_s": 9.0, "start_timeout_s": 9.0, **_GPU_OPTIONS},
        "ucc",
        0,
        [
            "--on-shared-device, --on-missing-cuda, --start-timeout-s, --limit-gpu-memory: no effect, because backend 'ucc' is left to "
            "Ray Train"
        ],
    ),
}


@pytest.mark.parametrize(("settings", "backend", "gpus", "lines"), _CASES.values(), ids=_CASES)
def test_a_line_for_each_reason(settings, backend, gpus, lines) -> None:
    """Options with one reason are one line, and those with an effect are on none."""
    assert without_effect(settings, backend, gpus) == lines


def test_a_plan_starts_no_group() -> None:
    """What applies to a group has no effect there, and what decides has one."""
    settings = {
        "timeout_s": 9.0,
        "verify": False,
        "limit_gpu_memory": True,
        "master_port": 29500,
        "start_timeout_s": 9.0,
    }
    assert without_effect(settings, "auto", 0.5, only_plans=True) == [
        "--collective-timeout-s, --no-verify, --limit-gpu-memory: no effect, because a plan starts no process group"
    ]
