"""Options of `run`, `plan` and `test` that have no effect, and the reason. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray_fracbackend.cli.options import setting_options
from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.left_to_ray import left_to_ray

_FOR_GPUS = ("on_shared_device", "on_missing_cuda", "limit_gpu_memory")
# Settings that Ray's own start has too.
_OF_RAY = ("backend", "init_method", "timeout_s")
# A plan shows the decision before a group exists.
_OF_A_GROUP = ("timeout_s", "verify", "limit_gpu_memory")


def no_effect(names: Collection[str], why: str) -> str:
    """Return a line about options that have no effect.

    Args:
        names: Settings of FracTorchConfig on the command line.
        why: The reason, as a clause.
    """
    return f"{option_names(names)}: no effect, because {why}"


def option_names(names: Collection[str]) -> str:
    """Return the options of settings, in the order of the settings."""
    return ", ".join(option for name, option in setting_options().items() if name in names)


def without_effect(
    settings: Mapping[str, Any], backend: str | None, gpus_per_worker: float, *, only_plans: bool = False
) -> list[str]:
    """Return a line for each reason why settings have no effect.

    Args:
        settings: Settings on the command line.
        backend: The requested backend.
        gpus_per_worker: GPUs that each worker requests.
        only_plans: No process group is started.
    """
    reasons: dict[str, str] = {}
    backends = parse_backend(backend)
    if left := left_to_ray(backend, {}):
        reasons.update(dict.fromkeys(set(settings) - set(_OF_RAY), left))
    if only_plans:
        _add(reasons, _OF_A_GROUP, "a plan starts no process group")
    if gpus_per_worker == 0:
        _add(reasons, _FOR_GPUS, "the workers request no GPU")
    elif gpus_per_worker >= 1:
        _add(reasons, ("limit_gpu_memory",), "workers with whole GPUs have no limit")
    if not backends.is_auto and not backends.has_nccl and settings.get("on_shared_device") != "error":
        _add(reasons, ("on_shared_device",), f"backend {backends.name!r} is set explicitly")
    found: dict[str, list[str]] = {}
    for name, why in reasons.items():
        if name in settings:
            found.setdefault(why, []).append(name)
    return [no_effect(names, why) for why, names in found.items()]


def _add(reasons: dict[str, str], names: Collection[str], why: str) -> None:
    for name in names:
        reasons.setdefault(name, why)
