"""The training of `gpu_training` by the libraries that Ray Train works with: Accelerate, Lightning, Transformers.

Each finds device and ranks in its own way and has to come to the same losses. Imported where they are installed only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from ray_fracbackend import get_start_report
from tests.gpu.gpu_training import BATCH_SIZE, NUM_STEPS, Network, answers_in, batch, make_trainer, state_of, tell


def all_batches() -> list[torch.Tensor]:
    """Inputs and labels of all steps, one after the other."""
    whole = zip(*(batch(step, torch.device("cpu")) for step in range(NUM_STEPS)), strict=True)
    return [torch.cat(parts) for parts in whole]


def mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """Losses of the whole batches from those of this rank's parts, all of one size."""
    together = torch.stack(losses)
    dist.all_reduce(together)
    return (together / dist.get_world_size()).tolist()


def accelerate_function(config: dict[str, Any]) -> None:
    """The same training by Hugging Face Accelerate, which finds the device and the ranks and deals out the batches."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    torch.manual_seed(0)
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    network = Network()
    loader = DataLoader(TensorDataset(*all_batches()), batch_size=BATCH_SIZE // dist.get_world_size())
    model, optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.5), loader)
    losses = []
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    tell(config, {"losses": losses, **state_of(model, accelerator.device), "report": get_start_report().to_dict()})


def lightning_function(config: dict[str, Any]) -> None:
    """The same training by Lightning's loop under one of Ray's strategies."""
    import lightning
    from ray.train.lightning import RayDDPStrategy, RayFSDPStrategy, RayLightningEnvironment, prepare_trainer

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.losses: list[torch.Tensor] = []
            self.state: dict[str, Any] = {}

        def training_step(self, pair: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.network(pair[0]), pair[1])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

        def on_train_end(self) -> None:  # afterwards the model is taken out of its wrapper
            self.state = state_of(self.trainer.strategy.model, self.trainer.strategy.root_device)

    torch.manual_seed(0)
    module = Module()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = TensorDataset(*(tensor[rank::num_ranks] for tensor in all_batches()))
    trainer = lightning.Trainer(
        max_epochs=1,
        strategy=RayFSDPStrategy() if config["strategy"] == "fsdp" else RayDDPStrategy(find_unused_parameters=True),
        plugins=[RayLightningEnvironment()],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    prepare_trainer(trainer).fit(module, DataLoader(mine, batch_size=BATCH_SIZE // num_ranks))
    report = get_start_report().to_dict()
    tell(config, {"losses": mean_over_ranks(module.losses), **module.state, "report": report})


class _WithLoss(nn.Module):
    """The network as Transformers wants a model: labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.losses: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits}


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """All batches, row by row, by the names of the model's arguments."""

    def __init__(self) -> None:
        self._inputs, self._labels = all_batches()

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index], "labels": self._labels[index]}


def transformers_function(config: dict[str, Any]) -> None:
    """The same training by transformers.Trainer, which leaves devices and ranks to Accelerate."""
    from ray.train.huggingface.transformers import prepare_trainer
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    torch.manual_seed(0)
    model = _WithLoss()
    arguments = TrainingArguments(
        output_dir=config["out"],
        per_device_train_batch_size=BATCH_SIZE // dist.get_world_size(),
        num_train_epochs=1,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        ddp_find_unused_parameters=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = prepare_trainer(InOrder(model=model, args=arguments, train_dataset=_Rows()))
    trainer.train()
    state = state_of(trainer.model_wrapped, arguments.device)
    tell(config, {"losses": mean_over_ranks(model.losses), **state, "report": get_start_report().to_dict()})


_FUNCTIONS = {
    "accelerate": accelerate_function,
    "lightning": lightning_function,
    "transformers": transformers_function,
}


def library(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run by the library that the job names; what each rank told."""
    make_trainer(job, _FUNCTIONS[job["library"]], strategy=job.get("strategy")).fit()
    return answers_in(job["out"])


JOBS = {"library": library}
