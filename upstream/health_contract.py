"""The part of ``ray.train.health`` that a probe needs.

No released Ray has that module: the shapes below are those of the accepted proposal
(ray-project/enhancements#71), and go when a Ray that has the module is the oldest one.
"""

from dataclasses import dataclass
from typing import Any, List

try:
    from ray.train.health import OnDemandProbe, ProbeResult
except ImportError:
    from ray_fracbackend.health import HealthResult as ProbeResult

    class OnDemandProbe:
        """A check that Ray runs once on each node.

        Attributes:
            stop_workers: The check needs the accelerators for itself.
            timeout_s: Seconds after which Ray ends it.
        """

        stop_workers: bool = False
        timeout_s: float = 60.0


__all__ = ["OnDemandProbe", "ProbeResult", "PushContext"]


@dataclass(frozen=True)
class PushContext:
    """Where a probe runs; the attributes that the proposal's context has as well.

    Attributes:
        node_id: The node's id.
        nodes: Ids of all nodes that run it at this moment.
        timeout_s: Seconds that it has.
    """

    node_id: str
    nodes: List[Any]
    timeout_s: float
