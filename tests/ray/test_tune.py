"""Ray Tune: concurrent trials on one logical GPU, each with its own start, and one that fails by itself.

Uses the engine of RAY_TRAIN_V2_ENABLED: a Tune function that fits a trainer with V2, Tuner(TorchTrainer) with V1. ci/test.py runs both.
tests/gpu/test_gpu_training.py, which also runs on emulated GPUs, shows that the trials really train at the same time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import ray

from ray_fracbackend._ray import v2_enabled
from tests.ray.conftest import run_example

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]


def starts(folder):
    """Return the start reports in the results folder of all trials."""
    return [json.loads(path.read_text()) for path in folder.rglob("start_report.json")]


def check(folder):
    """Check that three trials have started, each with different workers and a different port."""
    found = starts(folder)
    assert [len(start["workers"]) for start in found] == [2, 2, 2]
    assert len({worker["pid"] for start in found for worker in start["workers"]}) == 6
    assert {worker["resources"]["GPU"] for start in found for worker in start["workers"]} == {0.25}
    assert len({start["master_port"] for start in found}) == 3


@pytest.mark.skipif(not v2_enabled(), reason="a Tune function that fits a trainer is the way of the V2 engine")
def test_function_that_fits_a_trainer(tmp_path):
    """In the example all trials finish, the best one is found, and no traceback is printed."""
    done = run_example("tune_fractional_gpus.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("lr ", "best lr"))]
    assert [line.split(": ")[0] for line in lines] == ["lr 0.1", "lr 0.03", "lr 0.01", "best lr"]
    assert all(re.fullmatch(r"lr \S+: loss \d\.\d{4} with gloo", line) for line in lines[:3]), lines
    assert Path(lines[3].removeprefix("best lr: 0.1, its start: ")).exists()
    assert f"\nresults: {tmp_path}\n" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    check(tmp_path)


@pytest.mark.skipif(not v2_enabled(), reason="a Tune function that fits a trainer is the way of the V2 engine")
def test_function_whose_trial_diverges(no_cluster, tmp_path):
    """A trial that raises an error fails by itself; the other trial finishes."""
    from ray import tune

    from examples import tune_fractional_gpus

    ray.init("local", num_cpus=6, num_gpus=1, include_dashboard=False, log_to_driver=False)
    results = tune.Tuner(
        tune_fractional_gpus.fit_trial,
        param_space={"lr": tune.grid_search([1e3, 0.1]), "results_folder": str(tmp_path)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="tune", storage_path=str(tmp_path)),
    ).fit()
    assert [result.error is not None for result in results] == [True, False]
    assert "diverged at lr=1000.0" in str(results[0].error)
    assert results.get_best_result().config["lr"] == 0.1


@pytest.mark.skipif(not v2_enabled(), reason="Tuner(TorchTrainer) is an error of the V2 engine alone")
def test_tuner_of_a_trainer_with_v2():
    """The error that README quotes is this Ray's; it comes before a trial or this package is reached."""
    from ray import tune
    from ray.tune.error import TuneError

    from examples import tune_fractional_gpus

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    with pytest.raises(TuneError) as error:
        tune.Tuner(tune_fractional_gpus.make_trainer({}, "unused", "tune")).fit()
    assert f"TuneError: {error.value}" in readme


@pytest.mark.skipif(v2_enabled(), reason="Tuner(TorchTrainer) is the way of the V1 engine")
def test_tuner_of_a_trainer(no_cluster, tmp_path):
    """The same trials with V1: Tune receives the trainer itself."""
    from ray import train, tune

    from examples import tune_fractional_gpus

    ray.init("local", num_cpus=9, num_gpus=1, include_dashboard=False, log_to_driver=False)
    results = tune.Tuner(
        tune_fractional_gpus.make_trainer({}, str(tmp_path), "tune"),
        param_space={"train_loop_config": {"lr": tune.grid_search([1e3, 0.1, 0.01])}},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=getattr(tune, "RunConfig", train.RunConfig)(name="tune", storage_path=str(tmp_path)),
    ).fit()
    assert [result.error is not None for result in results] == [True, False, False]
    assert "diverged at lr=1000.0" in str(results[0].error)
    assert results.get_best_result().config["train_loop_config"]["lr"] == 0.1
    assert len({result.metrics["port"] for result in results[1:]}) == 2
    check(tmp_path)
