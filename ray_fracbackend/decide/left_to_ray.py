"""Find starts that are left to Ray Train unchanged, before any worker is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_fracbackend.decide.backends import parse_backend, similar_backend

# Ray resources of accelerators for which Ray starts the group itself.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "RBLN", "FURIOSA", "TTNPU", "MBLT", "neuron_cores")
# Case and result, in the format of the table's rows.
LEFT_TO_RAY = (
    "`backend` has [another name](#whose-backend), or the workers use `TPU`, `HPU`, `NPU`, `RBLN`, `FURIOSA`, `TTNPU`, `MBLT` or `neuron_cores`",
    "Ray Train starts the group itself. This is decided before the workers are probed: there is no verification and no report",
)


@dataclass(frozen=True)
class LeftToRay:
    """A start that is left to Ray Train.

    Attributes:
        reason: Why it is left to Ray Train, for a message.
        is_probable_typo: Whether the backend's name is probably a typo of ours, which torch would refuse later and less
            clearly.
    """

    reason: str
    is_probable_typo: bool = False


def left_to_ray(backend: str | None, resources_per_worker: Mapping[str, float]) -> LeftToRay | None:
    """Return whether a start is left to Ray Train.

    Args:
        backend: The requested backend.
        resources_per_worker: Resources that Ray reserved for each worker.

    Returns:
        The reason, None if this package starts the group.
    """
    if not parse_backend(backend).is_ours:
        similar = similar_backend(parse_backend(backend).name)
        hint = f" (did you mean {similar!r}?)" if similar else ""
        return LeftToRay(f"backend {backend!r} is left to Ray Train{hint}", is_probable_typo=similar is not None)
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return LeftToRay(f"{name} workers are left to Ray Train")
    return None
