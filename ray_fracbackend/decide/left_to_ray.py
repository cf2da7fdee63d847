"""Find starts that are left to Ray Train unchanged, before any worker is called."""

from __future__ import annotations

from collections.abc import Mapping

from ray_fracbackend.decide.backends import OUR_BACKENDS, parse_backend
from ray_fracbackend.decide.suggestions import did_you_mean

# Ray resources of accelerators for which Ray starts the group itself.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "RBLN", "FURIOSA", "TTNPU", "MBLT", "neuron_cores")


def left_to_ray(backend: str | None, resources_per_worker: Mapping[str, float]) -> str | None:
    """Return why a start is left to Ray Train, None if this package starts the group.

    Args:
        backend: The requested backend.
        resources_per_worker: Resources that Ray reserved for each worker.
    """
    if not parse_backend(backend).is_ours:
        return f"backend {backend!r} is left to Ray Train{did_you_mean(backend, OUR_BACKENDS)}"
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return f"{name} workers are left to Ray Train"
    return None
