"""Hugging Face transformers.Trainer with FracTorchConfig: two workers share one GPU.

usage: python transformers_trainer.py [RESULTS_FOLDER]

A language model with 12,000 weights learns to count; nothing is downloaded. The GPU is only a logical resource of Ray here, so
the script runs on any machine. On a machine with a GPU, leave ``num_gpus`` and ``on_missing_cuda`` out.
"""

import os
import sys
import tempfile

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ray_fracbackend import FracTorchConfig

VOCABULARY = 32


def sentences(count=256, length=16):
    """Return sequences of numbers with a constant step, modulo the vocabulary: the first two numbers determine the rest."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    rows = (first + step * torch.arange(length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(config, output_dir):
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    arguments = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=config["batch_size"],
        num_train_epochs=config["epochs"],
        learning_rate=config["learning_rate"],
        optim=config["optimizer"],
        logging_strategy="epoch",
        save_strategy="epoch",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=sentences())


def train_func(config):
    # Each rank has its own folder: the callback copies it, and it must not copy a file that rank 0 is still writing.
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, os.path.join(folder, f"rank{ray.train.get_context().get_world_rank()}"))
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        trainer.train()


def main(results_folder):
    ray.init("local", num_cpus=3, num_gpus=1)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"batch_size": 8, "epochs": 5, "learning_rate": 5e-3, "optimizer": "adamw_torch"},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),  # instead of TorchConfig()
        run_config=RunConfig(storage_path=results_folder),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['epoch']:.0f} epochs")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="transformers_trainer_"))
