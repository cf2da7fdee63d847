"""PyTorch Lightning with FracTorchConfig: two workers share one GPU.

usage: python lightning_mnist_like.py [RESULTS_FOLDER]

The images are random patterns with noise and have MNIST's shape, so nothing is downloaded. The GPU is only a logical resource of
Ray here, so the script runs on any machine. On a machine with a GPU, leave ``num_gpus`` and ``on_missing_cuda`` out.
"""

import sys
import tempfile

import lightning
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import FracTorchConfig


def images_like_mnist(count=512):
    """Return images with labels: each image is one of ten random patterns plus noise, and the label is the pattern's number."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(pictures[labels] + 0.3 * torch.randn(count, 1, 28, 28, generator=generator), labels)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_func(config):
    lightning.seed_everything(0)
    loader = DataLoader(images_like_mnist(), batch_size=config["batch_size"], shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=config["epochs"],
        accelerator="auto",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Classifier(), loader)


def main(results_folder):
    ray.init("local", num_cpus=3, num_gpus=1)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"batch_size": 32, "epochs": 3},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),  # instead of TorchConfig()
        run_config=RunConfig(storage_path=results_folder),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.3f} after epoch {result.metrics['epoch'] + 1}")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="lightning_mnist_like_"))
