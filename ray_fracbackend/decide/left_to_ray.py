"""Starts that are Ray Train's own and stay untouched; asked before any worker is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_fracbackend.decide.backends import parse_backend, similar_backend

# Ray resources of accelerators that Ray starts itself.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "neuron_cores")
# Case and result, as the rows of the table have them.
LEFT_TO_RAY = (
    "a backend of [another name](#whose-backend), or `TPU`, `HPU`, `NPU` or `neuron_cores` workers",
    "Ray's own start, untouched. Decided before the workers are probed: no verification, no report",
)


@dataclass(frozen=True)
class LeftToRay:
    """A start that is Ray Train's own.

    Attributes:
        reason: Why it is, for a message.
        is_probable_typo: The backend's name is most likely one of ours with a slip, which torch refuses later and less clearly.
    """

    reason: str
    is_probable_typo: bool = False


def left_to_ray(backend: str | None, resources_per_worker: Mapping[str, float]) -> LeftToRay | None:
    """Tell whether a start is Ray Train's own.

    Args:
        backend: The backend that was asked for.
        resources_per_worker: What Ray reserved for each worker.

    Returns:
        Why it is, None where it is ours.
    """
    if not parse_backend(backend).is_ours:
        similar = similar_backend(parse_backend(backend).name)
        hint = f" (did you mean {similar!r}?)" if similar else ""
        return LeftToRay(f"backend {backend!r} is left to Ray Train{hint}", is_probable_typo=similar is not None)
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return LeftToRay(f"{name} workers are left to Ray Train")
    return None
