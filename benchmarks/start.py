"""How long does on_start take? Ours with verification, and stock Ray Train's, alternating in one run.

Ray Train starts a group once on new worker processes, and creates new processes after a failure. A user therefore waits
for the first start in new processes. This is measured with one TorchTrainer run per value, stock and ours in turn,
together with the time from ``fit()`` to the train function. The script also repeats starts on one worker group, where
all imports are done and only messages and sockets remain.

usage: [RAY_TRAIN_V2_ENABLED=0|1] python benchmarks/start.py [--starts 11] [--workers 2 4 8] [--out FOLDER]
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

CONFIGS: dict[str, TorchConfig] = {
    "stock": TorchConfig(backend="gloo"),
    "ours": FracTorchConfig(),
    "ours_without_verification": FracTorchConfig(verify=False),
}


@dataclass
class MeasuredConfig(TorchConfig):
    """Start the workers of one run with each configuration in turn, and write the seconds to a file.

    The configurations are sent in the same way as a user's, so the workers import with them what they need.
    """

    configs: tuple[TorchConfig, ...] = ()
    result_path: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        return MeasuringBackend


class MeasuringBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: MeasuredConfig) -> None:
        seconds = [seconds_of_start(worker_group, config) for config in backend_config.configs]
        Path(backend_config.result_path).write_text(json.dumps(seconds))


def seconds_of_start(worker_group: Any, config: TorchConfig) -> float:
    backend = config.backend_cls()
    started = time.perf_counter()
    backend.on_start(worker_group, config)
    elapsed = time.perf_counter() - started
    backend.on_shutdown(worker_group, config)
    return elapsed


def run(num_workers: int, names: tuple[str, ...]) -> tuple[list[float], float]:
    """Return the seconds of repeated starts on one run's workers, and from fit() to the train function."""
    with tempfile.TemporaryDirectory() as folder:
        path, ready = Path(folder) / "seconds.json", Path(folder) / "ready"

        def train() -> None:
            if ray.train.get_context().get_world_rank() == 0:
                ready.write_text(repr(time.time()))

        started = time.time()
        TorchTrainer(
            train,
            torch_config=MeasuredConfig(
                backend="gloo", configs=tuple(CONFIGS[name] for name in names), result_path=str(path)
            ),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        seconds: list[float] = json.loads(path.read_text())
        return seconds, float(ready.read_text()) - started


def in_new_processes(num_workers: int, num_starts: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of on_start, and from fit() to the train function, by configuration."""
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    ready: dict[str, list[float]] = {"stock": [], "ours": []}
    for number in range(num_starts):
        for name in list(seconds) if number % 2 else list(seconds)[::-1]:
            found, ready_s = run(num_workers, (name,))
            seconds[name] += found
            ready[name].append(ready_s)
    return seconds, ready


def on_same_workers(num_workers: int, num_starts: int) -> dict[str, list[float]]:
    order = list(CONFIGS)
    names = tuple(order[(turn + i) % len(order)] for turn in range(num_starts + 2) for i in range(len(order)))
    found = list(zip(names, run(num_workers, names)[0], strict=True))[2 * len(order) :]  # after the imports
    return {name: [seconds for other, seconds in found if other == name] for name in order}


def summary(what: str, num_workers: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["ours"] / medians["stock"]
    listed = ", ".join(f"{name} {median * 1e3:.0f} ms" for name, median in medians.items())
    print(f"{num_workers} workers, {what}: {listed}, ratio {ratio:.3f}", flush=True)
    return {"num_workers": num_workers, "median_s": medians, "ratio": ratio, "seconds": seconds}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--starts", type=int, default=11)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    arguments = options.parse_args()
    ray.init("local", num_cpus=max(arguments.workers) + 2, log_to_driver=False, logging_level="ERROR")
    rows: dict[str, list[dict[str, Any]]] = {"new processes": [], "until training": [], "same workers": []}
    for num_workers in arguments.workers:
        seconds, ready = in_new_processes(num_workers, arguments.starts)
        repeated = on_same_workers(num_workers, arguments.starts)
        for what, found in zip(rows, (seconds, ready, repeated), strict=True):
            rows[what].append(summary(what, num_workers, found))
    ray.shutdown()
    engine = "v1" if os.environ.get("RAY_TRAIN_V2_ENABLED") == "0" else "v2"
    print(save(f"start_{engine}", arguments.out, {"engine": engine, "num_starts": arguments.starts, "rows": rows}))


if __name__ == "__main__":
    main()
