"""Run many trials under Ray Tune in one driver, two at a time, and check that nothing grows there.

Each trial trains two workers with half a logical GPU each. With V1 Tune receives the trainer, with V2 a function that fits it. The trials
run in consecutive tuners; the driver is sampled between them, when no trial runs.

The same trials run first with Ray's own TorchConfig in a separate driver: memory that also grows there is not ours.

usage: [RAY_TRAIN_V2_ENABLED=0|1] python -m tests.soak.trials [--tuners 10] [--trials 20] [--out FOLDER]

Writes ``trials_ENGINE_DATE.json``; the exit code is 1 if something grew or a trial failed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any

import ray
import ray.train
import torch
from ray import train, tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.common import parser, save
from ray_fracbackend import FracTorchConfig, _ray, get_start_report
from tests.soak.belongings import Samples, belongings
from tests.soak.cycles import of_ray, settle

# Growth of a driver's memory that is allowed beyond stock's.
RSS_BYTES_PER_TRIAL = 64 * 1024


def train_func(config: dict[str, Any]) -> None:
    numbers = torch.ones(8)
    torch.distributed.all_reduce(numbers)
    port = int(os.environ["MASTER_PORT"]) if config["stock"] else get_start_report().master_port
    train.report({"sum": numbers.sum().item(), "port": port})


def make_trainer(folder: str, stock: bool, **run_settings: Any) -> TorchTrainer:
    return TorchTrainer(
        train_func,
        train_loop_config={"stock": stock},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        torch_config=TorchConfig(backend="gloo") if stock else FracTorchConfig(on_missing_cuda="cpu"),
        run_config=RunConfig(storage_path=folder, **run_settings),
    )


def fit_trial(config: dict[str, Any]) -> None:
    from ray.tune.integration.ray_train import TuneReportCallback

    name = tune.get_context().get_trial_id()
    make_trainer(config["folder"], config["stock"], name=name, callbacks=[TuneReportCallback()]).fit()


def tuner(num_trials: int, folder: str, stock: bool) -> tune.Tuner:
    tune_config = tune.TuneConfig(num_samples=num_trials, max_concurrent_trials=2)
    if _ray.v2_enabled():
        settings = {"run_config": tune.RunConfig(storage_path=folder, verbose=0), "tune_config": tune_config}
        return tune.Tuner(fit_trial, param_space={"folder": folder, "stock": stock}, **settings)
    run_config = getattr(tune, "RunConfig", train.RunConfig)(storage_path=folder, verbose=0)
    return tune.Tuner(make_trainer(folder, stock), tune_config=tune_config, run_config=run_config)


def trials(num_tuners: int, num_trials: int, stock: bool) -> tuple[Samples, list[str]]:
    """Return the samples after each tuner, and the errors of trials."""
    samples, errors = Samples(), []
    for number in range(1, num_tuners + 1):
        with tempfile.TemporaryDirectory() as folder:
            results = tuner(num_trials, folder, stock).fit()
            errors += [str(result.error) for result in results if result.error]
            errors += [
                f"sum {result.metrics}" for result in results if not result.error and result.metrics["sum"] != 16
            ]
            del results
        settle(samples)
        samples.add(number * num_trials, {"driver": belongings(), "ray": of_ray()})
        print(
            f"{number * num_trials}: {samples.figures['driver']['rss_bytes'][-1] >> 20} MiB",
            file=sys.stderr,
            flush=True,
        )
    return samples, errors


def in_a_driver(num_tuners: int, num_trials: int, stock: bool) -> tuple[Samples, list[str]]:
    """The same in the calling process with its own Ray."""
    ray.init("local", num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        return trials(num_tuners, num_trials, stock)
    finally:
        ray.shutdown()


def main() -> None:
    # By name, because functions of __main__ have no meaning for the workers of a spawned process.
    from tests.soak.trials import in_a_driver

    command_line = parser(__doc__ or "")
    command_line.add_argument("--tuners", type=int, default=10)
    command_line.add_argument("--trials", type=int, default=20, help="trials of each tuner; the first tuner warms up")
    arguments = command_line.parse_args()
    engine = "v2" if _ray.v2_enabled() else "v1"
    number = arguments.tuners * arguments.trials
    results: dict[str, Any] = {"engine": engine, "trials": number}
    limit = RSS_BYTES_PER_TRIAL
    for side in ("stock", "ours"):
        print(f"{side}: {number} trials", file=sys.stderr, flush=True)
        started = time.monotonic()
        # Each in a new process: memory that the first leaves in the allocator must not be reused by the second.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            samples, errors = pool.apply(in_a_driver, (arguments.tuners, arguments.trials, side == "stock"))
        judged = samples.judged(arguments.trials, limit)
        results[side] = {"seconds": time.monotonic() - started, "errors": errors, **judged}
        limit = RSS_BYTES_PER_TRIAL + max(0, round(judged["trends"]["driver"]["rss_bytes"]["slope"]))
    print(save(f"trials_{engine}", arguments.out, results))
    print("\n".join(errors + judged["grew"]) or "nothing grew")
    raise SystemExit(bool(errors or judged["grew"]))


if __name__ == "__main__":
    main()
