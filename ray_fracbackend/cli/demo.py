"""Demo: two workers at half a GPU each train a small network on scikit-learn's digits. Driver, and its train function.

The worker of rank 0 sends its progress through a Ray queue; the driver draws it.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.queue import Empty, Queue
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import _ray
from ray_fracbackend.cli.cluster import own_sigterm
from ray_fracbackend.cli.ending import emit
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.report import StartReport
from ray_fracbackend.worker.state import get_start_report

NUM_WORKERS = 2
_BATCH_SIZE = 32
_CHECKPOINT_FILE = "model.pt"


def build_model() -> nn.Module:
    """Return the network: 8x8 grey images to ten digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's 1,797 handwritten digits, as float32 in 0 to 1: four fifths to train on, one fifth to test on."""
    from sklearn.datasets import load_digits as load

    data = load()
    images = torch.tensor(data.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(data.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    split = len(labels) * 4 // 5
    train, test = order[:split], order[split:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_digits(config: dict[str, Any]) -> None:
    """Train, as for a stock TorchTrainer."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    queue: Queue | None = config["queue"] if rank == 0 else None
    if queue is not None and config["report"]:
        queue.put(("report", get_start_report()))
    train_set, test_set = load_digits()
    loader = ray.train.torch.prepare_data_loader(DataLoader(train_set, batch_size=_BATCH_SIZE, shuffle=True))
    if queue is not None:
        queue.put(("total", len(loader) * config["epochs"]))
    model = ray.train.torch.prepare_model(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
            if queue is not None:
                queue.put(("step", None))
        metrics = {"epoch": epoch + 1, "loss": total.item() / len(loader), "accuracy": accuracy(model, test_set)}
        _report(metrics, model, rank)
        if queue is not None:
            queue.put(("epoch", metrics))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of right predictions, in 0 to 1."""
    images, labels = data.tensors
    device = next(model.parameters()).device
    with torch.no_grad():
        answers = model(images.to(device)).argmax(dim=1).cpu()
    share: float = (answers == labels).float().mean().item()
    return share


def _report(metrics: dict[str, Any], model: nn.Module, rank: int) -> None:
    """Report metrics from every rank, a checkpoint from rank 0 alone: two ranks must not write one file."""
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        torch.save(inner.state_dict(), os.path.join(directory, _CHECKPOINT_FILE))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory))


class _Display:
    """Progress display of what rank 0 sends."""

    def __init__(self, queue: Queue, epochs: int) -> None:
        self._queue, self._epochs = queue, epochs
        self._bar: Any = None

    def __enter__(self) -> _Display:
        from tqdm import tqdm

        self._bar = tqdm(desc="starting the workers", unit=" steps", disable=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show_while(self, thread: threading.Thread) -> None:
        """Show what comes until the thread has ended and nothing more comes."""
        while True:
            alive = thread.is_alive()
            try:
                self._show(*self._queue.get(timeout=0.2))
            except Empty:
                if not alive:
                    return

    def _show(self, kind: str, value: Any) -> None:
        if kind == "step":
            self._bar.update()
        elif kind == "total":
            self._bar.set_description("training")
            self._bar.reset(total=value)
        elif kind == "epoch":
            self._bar.set_description(f"epoch {value['epoch']}/{self._epochs} done")
            self._emit(
                f"epoch {value['epoch']:>2}/{self._epochs}: loss {value['loss']:.3f}, accuracy {value['accuracy']:.3f}"
            )
        elif isinstance(value, StartReport):
            self._emit(f"\n{value}\n")

    def _emit(self, text: str) -> None:
        with self._bar.external_write_mode():
            emit(text)


def _fit(trainer: TorchTrainer, display: _Display) -> Result:
    """Train in a thread while this one shows the progress: Ray Train V2 takes Ctrl-C in the main thread and ends with exit code 0."""
    outcome: list[Result | BaseException] = []

    def fit() -> None:
        try:
            outcome.append(trainer.fit())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    try:
        display.show_while(thread)
    except BaseException:  # Ctrl-C, or an output that nobody reads: the thread goes on
        ray.init = _not_in(thread, ray.init)
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _not_in(thread: threading.Thread, init: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse ray.init in a thread: any call of Ray after ray.shutdown makes it, which would start a new Ray."""

    @functools.wraps(init)
    def init_ray(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is thread:
            raise RuntimeError("the run that this thread waited for was ended by ray.shutdown()")
        return init(*arguments, **options)

    return init_ray


def run_demo(stock: bool = False, epochs: int = 10) -> float:
    """Train, print the share map, the choice and the progress, and load the checkpoint back.

    Args:
        stock: Use Ray's own TorchConfig instead, for comparison.
        epochs: Passes over the data, at least 1.

    Returns:
        Accuracy of the loaded checkpoint on the test set, in 0 to 1.

    Raises:
        ValueError: ``epochs`` is below 1.
    """
    if epochs < 1:
        raise ValueError(f"run_demo(epochs={epochs!r}): epochs must be at least 1.")
    # V1 is silent only if asked to be, as Tune prints tables of its own, and warns of being asked.
    quiet: dict[str, Any] = {} if _ray.v2_enabled() else {"verbose": 0}
    warnings.filterwarnings("ignore", r"`ray\.train\.RunConfig\(verbose\)`")
    _start_ray()
    try:
        queue = Queue(actor_options={"num_cpus": 0})
        config = TorchConfig() if stock else FracTorchConfig(on_missing_cuda="cpu")
        emit(f"two workers at half a GPU each, torch_config={type(config).__name__}")
        with tempfile.TemporaryDirectory() as storage, _Display(queue, epochs) as display:
            trainer = TorchTrainer(
                train_digits,
                train_loop_config={"queue": queue, "epochs": epochs, "report": not stock},
                torch_config=config,
                scaling_config=ScalingConfig(
                    num_workers=NUM_WORKERS, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}
                ),
                run_config=RunConfig(name="digits", storage_path=storage, **quiet),
            )
            result = _fit(trainer, display)
            if result.checkpoint is None:
                raise FracBackendError("the run ended without a checkpoint; see the log above.")
            with result.checkpoint.as_directory() as directory:
                state = torch.load(os.path.join(directory, _CHECKPOINT_FILE), weights_only=True)
    finally:
        ray.shutdown()
    model = build_model()
    model.load_state_dict(state)
    final = accuracy(model, load_digits()[1])
    emit(f"checkpoint of rank 0 loaded back: accuracy {final:.3f}")
    return final


def _start_ray() -> None:
    """Start a local Ray with one GPU: the machine's first, or a logical one where there is none."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        emit("no CUDA device here: declaring one logical GPU to Ray; training runs on the CPU")
    # V2's report() waits for the controller, which by default looks at its workers every 2 s: once an epoch here. Ray's processes
    # inherit the variable, where a runtime_env would start each anew.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    with own_sigterm():
        ray.init(
            "local",
            num_cpus=max(4, os.cpu_count() or 1),
            num_gpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
