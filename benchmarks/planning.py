"""How long does the decision take for 1,000 to 300,000 simulated workers, and how much of it is garbage collection?

usage: python benchmarks/planning.py [--out FOLDER]
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from common import parser, save

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo

_GPUS_PER_NODE = 8
_REPEATS = 9


def made_up_workers(num_workers: int, ranks_per_gpu: int) -> list[WorkerInfo]:
    workers = []
    for rank in range(num_workers):
        gpu = rank // ranks_per_gpu
        node = gpu // _GPUS_PER_NODE
        device = DeviceInfo(
            uuid=f"GPU-{gpu:08x}", name="made up", pci_bus_id=f"00000000:{gpu % _GPUS_PER_NODE:02x}:00.0"
        )
        workers.append(
            WorkerInfo(
                rank=rank,
                node_id=f"node{node}",
                node_ip=f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}",
                hostname=f"host{node}",
                boot_id=f"boot{node}",
                resources={"CPU": 1.0, "GPU": 1 / ranks_per_gpu},
                devices=(device,),
                num_visible_devices=_GPUS_PER_NODE,
                nccl_available=True,
                nccl_version=(2, 28, 9),
            )
        )
    return workers


class CollectorTime:
    """Count the seconds of garbage collections while it is in ``gc.callbacks``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = []
    for ranks_per_gpu in (1, 2):
        for num_workers in (1_000, 10_000, 100_000, 300_000):
            workers = made_up_workers(num_workers, ranks_per_gpu)
            seconds = []
            collector = CollectorTime()
            gc.callbacks.append(collector)
            for _ in range(_REPEATS):
                started = time.perf_counter()
                plan = decide_start(workers, Settings())
                seconds.append(time.perf_counter() - started)
            gc.callbacks.remove(collector)
            median_s = statistics.median(seconds)
            rows.append(
                {
                    "num_workers": num_workers,
                    "ranks_per_gpu": ranks_per_gpu,
                    "backend": plan.backend,
                    "median_s": median_s,
                    "min_s": min(seconds),
                    "mean_s": statistics.mean(seconds),
                    "mean_gc_s": collector.seconds / _REPEATS,
                }
            )
            print(f"{num_workers:>7} workers, {ranks_per_gpu} a GPU: {median_s * 1e3:8.2f} ms", flush=True)
    print(save("planning", arguments.out, {"rows": rows}))


if __name__ == "__main__":
    main()
