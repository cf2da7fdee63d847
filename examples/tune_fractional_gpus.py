"""Ray Tune with fractional GPUs: two trials run at once on one GPU, and each trains with two workers on a quarter of a GPU.

usage: python tune_fractional_gpus.py [RESULTS_FOLDER]

The GPU is only a logical resource of Ray here, so the script runs on any machine. On a machine with a GPU, leave ``num_gpus`` and
``on_missing_cuda`` out. With Ray Train V2, the default of Ray 2.60, a Tune function creates and fits the trainer.
``Tuner(TorchTrainer(...))`` raises a TuneError there, unless RAY_TRAIN_V2_ENABLED=0 is set.
"""

import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray import train, tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from ray_fracbackend import FracTorchConfig, get_start_report


def train_func(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    device = ray.train.torch.get_device()
    inputs = torch.randn(64, 8).to(device)
    targets = inputs.sum(dim=1, keepdim=True)
    for _ in range(50):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if not loss.isfinite():  # this trial fails, the others continue
            raise ValueError(f"diverged at lr={config['lr']}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Every trial has its own start, with another port and other workers.
    start = get_start_report()
    train.report({"loss": loss.item(), "backend": start.backend, "port": start.rendezvous.master_port})


def make_trainer(config, results_folder, name, **run_settings):
    return TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.25}),
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),
        run_config=RunConfig(name=name, storage_path=results_folder, **run_settings),
    )


def fit_trial(config):
    """One trial: it reserves one CPU itself, and its trainer asks Ray for the workers."""
    name = tune.get_context().get_trial_id()
    # What rank 0 reports goes on to Tune.
    make_trainer({"lr": config["lr"]}, config["results_folder"], name, callbacks=[TuneReportCallback()]).fit()


def main(results_folder):
    # start_report.json of each trial contains the reason for its backend; without log_to_driver=False it is also printed.
    ray.init("local", num_cpus=6, num_gpus=1, log_to_driver=False)
    results = tune.Tuner(
        fit_trial,
        param_space={"lr": tune.grid_search([0.1, 0.03, 0.01]), "results_folder": results_folder},
        # Tune counts only the trial's own CPU, not its workers: allow as many trials as the cluster can run with their workers.
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="tune", storage_path=results_folder),
    ).fit()
    for result in results:
        outcome = "failed" if result.error else "loss {loss:.4f} with {backend}".format(**result.metrics)
        print(f"lr {result.config['lr']}: {outcome}")
    best = results.get_best_result()
    print(f"best lr: {best.config['lr']}, its start: {results_folder}/{best.metrics['trial_id']}/start_report.json")
    print(f"results: {results_folder}")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="tune_fractional_gpus_"))
