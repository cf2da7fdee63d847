"""Run one fit of Ray Train and kill a worker at a random moment: Ray must restart it and the run must succeed.

As a program, ``python -m tests.soak.fits FIT FOLDER``, it runs one fit in its own Ray and writes ``FOLDER/fit.json``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.processes import processes_with, train_worker_processes

# Time limits for one fit with its restart, and for Ray's own processes after it.
FIT_S, END_S = 240.0, 60.0
# Inherited by every process of a fit, so that left processes can be found.
_MARK = "RFB_SOAK_FIT"
_NUM_STEPS, _PAUSE_S = 200, 0.02


@dataclass(frozen=True)
class FitRun:
    """An engine of Ray Train, a backend, the rank and number of workers, and the time after which the worker is killed."""

    engine: str
    backend: str
    num_workers: int
    rank: int
    after_s: float

    @classmethod
    def random(cls, rng: random.Random) -> FitRun:
        num_workers = rng.randint(2, 3)
        after_s = round(rng.uniform(0, 10), 2)
        return cls(
            rng.choice(("v1", "v2")), rng.choice(("gloo", "ipc")), num_workers, rng.randrange(num_workers), after_s
        )


def play(run: FitRun) -> dict[str, Any]:
    """Run one fit in a separate process; ``problems`` is empty if it succeeded and left no process."""
    mark = uuid.uuid4().hex
    engine = {"RAY_TRAIN_V2_ENABLED": str(int(run.engine == "v2")), _MARK: mark, "OMP_NUM_THREADS": "1"}
    problems: list[str] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.soak.fits", json.dumps(asdict(run)), folder]
        with open(Path(folder) / "log", "wb") as log:
            fit = subprocess.Popen(command, env={**os.environ, **engine}, stdout=log, stderr=log)
            try:
                fit.wait(FIT_S)
            except subprocess.TimeoutExpired:
                problems.append(f"the fit takes over {FIT_S:g} s")
            finally:
                fit.kill()
                fit.wait()
        answer = Path(folder) / "fit.json"
        if answer.exists():
            found = json.loads(answer.read_text())
        if found.get("error") or not found.get("finished"):
            problems.append(f"the fit did not finish: {found.get('error')}")
            problems.append(Path(folder, "log").read_text()[-4000:])
    return {**found, "problems": problems + _left(mark)}


def _left(mark: str) -> list[str]:
    """Return processes of a fit that outlive it, after ending them."""
    end = time.monotonic() + END_S
    while (left := processes_with(_MARK, mark)) and time.monotonic() < end:
        time.sleep(0.2)
    found = [f"process {process.pid} is left: {' '.join(process.cmdline())[:100]}" for process in left]
    for process in left:
        process.kill()
    return found


def _train(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    with open(Path(config["folder"]) / "attempts", "a") as attempts:
        attempts.write(f"{rank} {os.getpid()}\n")
    for step in range(_NUM_STEPS):
        numbers = torch.full((512,), float(rank + step))
        dist.all_reduce(numbers)
        assert bool((numbers == size * (size - 1) / 2 + size * step).all()), f"all_reduce is wrong in step {step}"
        time.sleep(_PAUSE_S)
    ray.train.report({"done": 1})
    if rank == 0:
        (Path(config["folder"]) / "finished").touch()


def _kill_one(run: FitRun, killed: list[int], done: threading.Event) -> None:
    while len(workers := train_worker_processes()) < run.num_workers:
        if done.wait(0.05):
            return
    if not done.wait(run.after_s):
        victim = workers[run.rank]
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
            killed.append(victim.pid)


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_fracbackend import FracTorchConfig

    run, folder = FitRun(**json.loads(sys.argv[1])), sys.argv[2]
    ray.init("local", num_cpus=run.num_workers + 2, include_dashboard=False)
    trainer = TorchTrainer(
        _train,
        train_loop_config={"folder": folder},
        torch_config=FracTorchConfig(backend=run.backend, timeout_s=30),
        scaling_config=ScalingConfig(num_workers=run.num_workers),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    )
    killed: list[int] = []
    done = threading.Event()
    killer = threading.Thread(target=_kill_one, args=(run, killed, done))
    killer.start()
    error = None
    try:
        trainer.fit()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    done.set()
    killer.join()
    ray.shutdown()
    attempts = Path(folder) / "attempts"
    found = {
        "error": error,
        "killed": bool(killed),
        "workers_that_trained": len(attempts.read_text().splitlines()) if attempts.exists() else 0,
        "finished": (Path(folder) / "finished").exists(),
    }
    (Path(folder) / "fit.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
