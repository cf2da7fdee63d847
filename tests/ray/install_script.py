"""A run whose workers get the package from runtime_env, as docs/install.md says. Not collected: test_install.py starts it.

usage: python install_script.py RESULTS_FOLDER PY_MODULE
"""

import json
import sys
from pathlib import Path

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import ray_fracbackend
from ray_fracbackend import FracTorchConfig, get_start_report


def train_func(config):
    found = {"package": ray_fracbackend.__file__, "backend": get_start_report().backend}
    rank = ray.train.get_context().get_world_rank()
    Path(config["results_folder"], f"rank{rank}.json").write_text(json.dumps(found))


def main(results_folder, py_module):
    module = ray_fracbackend if py_module == "module" else py_module
    ray.init("local", num_cpus=4, num_gpus=1, include_dashboard=False, runtime_env={"py_modules": [module]})
    TorchTrainer(
        train_func,
        train_loop_config={"results_folder": results_folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),
        run_config=RunConfig(name="install", storage_path=results_folder),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
