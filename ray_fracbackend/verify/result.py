"""Result of the verification of a process group. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """Measurements of a verified group; every result was exact.

    Attributes:
        backend: The group's backend as torch names it.
        device: Device that the collectives ran on, such as ``cuda:0``.
        world_size: Number of ranks in the group.
        latency_s: Seconds of an all_reduce of 1 KiB from the call to its completion, the median of all ranks. Each rank
            uses the faster of two calls after a warm-up call; for Gloo on the CPU its only call.
        bandwidth_bytes_per_s: Bandwidth of a 1 MiB all_reduce, measured in the same way.
        rank_seconds: Sum of the two times of each rank, by rank in the group.
        total_s: Seconds of the whole verification on this rank.
        path: How the group moves tensors of the device, and why, if its backend has several ways; else None.
    """

    backend: str
    device: str
    world_size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    rank_seconds: tuple[float, ...]
    total_s: float
    path: str | None = None

    @property
    def speed(self) -> str:
        """Latency and bandwidth with their units."""
        return (
            f"all_reduce {self.latency_s * 1e3:.2f} ms at 1 KiB, {self.bandwidth_bytes_per_s / 1e6:.0f} MB/s at 1 MiB"
        )
