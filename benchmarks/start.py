"""How long on_start takes: ours with verification against stock Ray Train's, on the same workers, alternating.

A real TorchTrainer run whose backend does the measuring, so that the worker group is the engine's own.

usage: [RAY_TRAIN_V2_ENABLED=0|1] python benchmarks/start.py [--starts 15] [--workers 2 4 8] [--out FOLDER]
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from common import parser, save
from ray.train import RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig


@dataclass
class MeasuredConfig(TorchConfig):
    """Starts the workers of one run many times, by each configuration in turn, and writes the seconds to a file."""

    num_starts: int = 15
    result_path: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        return MeasuringBackend


class MeasuringBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: MeasuredConfig) -> None:
        configs = {
            "stock": TorchConfig(backend="gloo"),
            "ours": FracTorchConfig(),
            "ours_without_verification": FracTorchConfig(verify=False),
        }
        names = list(configs)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(2):  # imports, and the connections to the workers
            for config in configs.values():
                seconds_of_start(worker_group, config)
        for start in range(backend_config.num_starts):
            turn = start % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(seconds_of_start(worker_group, configs[name]))
        Path(backend_config.result_path).write_text(json.dumps(seconds))


def seconds_of_start(worker_group: Any, config: TorchConfig) -> float:
    backend = config.backend_cls()
    started = time.perf_counter()
    backend.on_start(worker_group, config)
    elapsed = time.perf_counter() - started
    backend.on_shutdown(worker_group, config)
    return elapsed


def measure(num_workers: int, num_starts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        TorchTrainer(
            lambda: None,
            torch_config=MeasuredConfig(backend="gloo", num_starts=num_starts, result_path=str(path)),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        seconds: dict[str, list[float]] = json.loads(path.read_text())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {"num_workers": num_workers, "median_s": medians, "ratio": medians["ours"] / medians["stock"]}
    print(
        f"{num_workers} workers: stock {medians['stock'] * 1e3:.1f} ms, ours {medians['ours'] * 1e3:.1f} ms, "
        f"without verification {medians['ours_without_verification'] * 1e3:.1f} ms, ratio {row['ratio']:.2f}",
        flush=True,
    )
    return {**row, "seconds": seconds}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--starts", type=int, default=15)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    arguments = options.parse_args()
    ray.init(num_cpus=max(arguments.workers) + 2, log_to_driver=False, logging_level="ERROR")
    rows = [measure(num_workers, arguments.starts) for num_workers in arguments.workers]
    ray.shutdown()
    engine = "v1" if os.environ.get("RAY_TRAIN_V2_ENABLED") == "0" else "v2"
    print(save(f"start_{engine}", arguments.out, {"engine": engine, "num_starts": arguments.starts, "rows": rows}))


if __name__ == "__main__":
    main()
