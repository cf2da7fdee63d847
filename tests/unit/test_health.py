"""A start in the shape of Ray's coming health results."""

import json
from dataclasses import asdict, dataclass, field

from ray_fracbackend.errors import VerificationError
from ray_fracbackend.health import health_result
from ray_fracbackend.options import StartOptions
from ray_fracbackend.plan import plan_start
from ray_fracbackend.rendezvous import RendezvousPlan
from ray_fracbackend.report import StartReport
from tests.unit.builders import FIGURES, gpu, job


def start_report(verification=None):
    workers = tuple(job(gpu(total_memory_bytes=1 << 30), gpu(total_memory_bytes=1 << 30)))
    rendezvous = RendezvousPlan(
        master_addrs=("10.0.0.1", "10.0.0.1"),
        master_port=29500,
        init_method="env",
        one_node=True,
        uses_gloo=True,
        reason="rank 0 at 10.0.0.1:29500 (one node)",
        warnings=("a doubt",),
    )
    plan = plan_start(workers, StartOptions())
    return StartReport(plan=plan, workers=workers, rendezvous=rendezvous, verification=verification)


def test_verified_start():
    """Figures, load of each device, warnings as events, the log line as detail."""
    result = health_result(start_report(FIGURES))
    assert result.passed is True
    assert result.metrics["all_reduce_latency_s"] == 0.0002
    assert result.metrics["slowest_rank_s"] == 0.003
    assert result.devices == {"GPU-a": {"num_ranks": 2, "gpu_fraction": 1.0, "total_memory_bytes": 1 << 30}}
    assert result.events[0].startswith("2 of 2 ranks share a GPU")
    assert result.events[1:] == ["a doubt"]
    assert result.detail.startswith("ranks 0,1 share GPU-a")


def test_start_without_verification():
    """What was not checked has neither passed nor failed."""
    result = health_result(start_report())
    assert result.passed is None
    assert result.metrics == {"world_size": 2}


def test_verification_alone():
    """A verified group is a passed check."""
    result = health_result(FIGURES)
    assert result.passed is True
    assert result.metrics["world_size"] == 2
    assert result.detail == "gloo on cuda:0: 2 ranks verified in 12 ms"


def test_error():
    """An error is a failed check with its machine-readable reason as event."""
    result = health_result(VerificationError("rank 1 is not in it", ranks=(1,)))
    assert (result.passed, result.events, result.detail) == (False, ["verification"], "rank 1 is not in it")
    assert result.metrics == {"num_ranks_at_fault": 1}


def test_it_fits_the_proposed_class():
    """The adapter is one call, and everything is a plain value."""

    @dataclass
    class ProbeResult:
        """As in ray-project/enhancements, Ray Train Monitoring and Diagnostics."""

        metrics: dict[str, float] = field(default_factory=dict)
        devices: dict[str, dict[str, float]] = field(default_factory=dict)
        events: list[str] = field(default_factory=list)
        passed: bool | None = None
        detail: str = ""

    found = ProbeResult(**asdict(health_result(start_report(FIGURES))))
    assert json.loads(json.dumps(asdict(found))) == asdict(health_result(start_report(FIGURES)))
