"""Start and stop worker groups many times in one driver, and check that nothing grows there or in the workers.

One group of two workers runs all cycles, alternating the backends. At regular intervals a second group is created, started, stopped and
shut down, so actors and processes are counted too. With V1 the driver is this process, with V2 it is Ray Train's controller, where V2 runs
a backend.

usage: [RAY_TRAIN_V2_ENABLED=0|1] python -m tests.soak.cycles [--cycles 1000] [--every 20] [--group-every 50] [--out FOLDER]

Writes ``cycles_ENGINE_DATE.json``; the exit code is 1 if something grew.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train._internal.worker_group import WorkerGroup
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.common import parser, save
from ray_fracbackend import FracTorchConfig, _ray
from tests.processes import train_worker_processes
from tests.soak.belongings import Samples, belongings

# What a start may add to the resident memory of a process: far below the 1 MiB tensor of its verification, and above what
# the allocator's moods come to over a thousand starts.
RSS_BYTES_PER_START = 16 * 1024
# Cycles until all is imported, opened and cached that is so once.
WARM_UP = 100
CONFIGS = (FracTorchConfig(backend="gloo"), FracTorchConfig(backend="ipc"))
_SETTLE_S = 60.0

MakeGroup = Callable[[], Any]


def cycles(group: Any, make_group: MakeGroup, number: int, every: int, group_every: int) -> Samples:
    """The cycles on one group, with the samples of this process, of its workers, and of Ray."""
    samples = Samples()
    for count in range(1, number + 1):
        start_and_stop(group, CONFIGS[count % len(CONFIGS)])
        if count % group_every == 0:
            second = make_group()
            for config in CONFIGS:
                start_and_stop(second, config)
            second.shutdown()
        if count % every == 0:
            settle(samples)
            workers = group.execute(belongings)
            found = {f"worker {rank}": figures for rank, figures in enumerate(workers)}
            samples.add(count, {"driver": belongings(), "ray": of_ray(), **found})
            print(f"{count}: {samples.figures['driver']['rss_bytes'][-1] >> 20} MiB", file=sys.stderr, flush=True)
    return samples


def start_and_stop(group: Any, config: TorchConfig) -> None:
    backend = config.backend_cls()
    backend.on_start(group, config)
    backend.on_shutdown(group, config)


def of_ray() -> dict[str, int]:
    """Living actors of this Ray, and the processes of Ray Train's workers."""
    actors = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
    process = psutil.Process()
    # Below a driver that has started Ray, beside an actor.
    above = process if ray.get_runtime_context().get_actor_id() is None else process.parent()
    return {"actors": len(actors), "worker_processes": len(train_worker_processes(above))}


def settle(samples: Samples) -> None:
    """Waits for Ray to end what has been shut down, which it does in the background: until it has what it had at first."""
    first = {name: values[0] for name, values in samples.figures.get("ray", {}).items()}
    end = time.monotonic() + _SETTLE_S
    while first and of_ray() != first and time.monotonic() < end:
        time.sleep(0.1)


@dataclass
class CyclingConfig(TorchConfig):
    """Runs the cycles where Ray Train V2 calls a backend, and writes the samples to a file."""

    numbers: tuple[int, int, int] = (0, 0, 0)
    result_path: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        return CyclingBackend


class CyclingBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: CyclingConfig) -> None:
        def make_group() -> Any:
            return type(worker_group).create(worker_group._train_run_context, worker_group.get_worker_group_context())

        samples = cycles(worker_group, make_group, *backend_config.numbers)
        Path(backend_config.result_path).write_text(json.dumps(asdict(samples)))


def with_v1(numbers: tuple[int, int, int]) -> Samples:
    def make_group() -> Any:
        return WorkerGroup(num_workers=2, resources_per_worker={"CPU": 1})

    group = make_group()
    try:
        return cycles(group, make_group, *numbers)
    finally:
        group.shutdown(patience_s=1)


def with_v2(numbers: tuple[int, int, int]) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        TorchTrainer(
            lambda: None,
            torch_config=CyclingConfig(backend="gloo", numbers=numbers, result_path=str(path)),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        return Samples(**json.loads(path.read_text()))


def main() -> None:
    command_line = parser(__doc__ or "")
    command_line.add_argument("--cycles", type=int, default=1000)
    command_line.add_argument("--every", type=int, default=20, help="cycles between samples")
    command_line.add_argument("--group-every", type=int, default=50, help="cycles between new worker groups")
    arguments = command_line.parse_args()
    if arguments.cycles <= WARM_UP + arguments.every:
        command_line.error(f"the first {WARM_UP} cycles are not judged: --cycles must be above that and --every")
    numbers = (arguments.cycles, arguments.every, arguments.group_every)
    engine = "v2" if _ray.v2_enabled() else "v1"
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=engine == "v2", logging_level="ERROR")
    started = time.monotonic()
    samples = with_v2(numbers) if engine == "v2" else with_v1(numbers)
    seconds = time.monotonic() - started
    ray.shutdown()
    judged = samples.judged(WARM_UP, RSS_BYTES_PER_START)
    results = {"engine": engine, "cycles": arguments.cycles, "every": arguments.every, "seconds": seconds}
    print(save(f"cycles_{engine}", arguments.out, {**results, **judged}))
    print("\n".join(judged["grew"]) or "nothing grew")
    raise SystemExit(bool(judged["grew"]))


if __name__ == "__main__":
    main()
