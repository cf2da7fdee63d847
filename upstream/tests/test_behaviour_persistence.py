"""Behaviour: checkpoints over failures and restarts."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import ray
import ray.train.collective
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NUM_STEPS = 4
FAILS_AFTER = 1


def train_func():
    """Count steps; fail once after a step in the middle, then continue from there."""
    rank, start = ray.train.get_context().get_world_rank(), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            start = torch.load(Path(folder, f"rank{rank}.pt"))["step"] + 1
    for step in range(start, NUM_STEPS):
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"step": step}, Path(folder, f"rank{rank}.pt"))
            ray.train.report(
                {"step": step, "score": step, "sum": total.item(), "start": start},
                checkpoint=Checkpoint.from_directory(folder),
                checkpoint_dir_name=f"step{step}",
            )
        ray.train.collective.barrier()
        if start == 0 and step == FAILS_AFTER:
            # The controller has the checkpoint once it can return it.
            assert len(ray.train.get_all_reported_checkpoints()) == step + 1
            raise RuntimeError("lost")


def test_restart_from_checkpoint(shared_ray, tmp_path):
    """A failed group restarts from its checkpoint, and keeps the best one."""
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="score"
            ),
        ),
    )
    result = trainer.fit()
    last = NUM_STEPS - 1
    assert result.error is None
    assert result.metrics == {
        "step": last,
        "score": last,
        "sum": 2.0 * last,
        "start": FAILS_AFTER + 1,
    }
    kept = sorted(path.name for path in (tmp_path / "run").glob("step*"))
    assert kept == [f"step{last - 1}", f"step{last}"]
    files = sorted(path.name for path in (tmp_path / "run" / kept[-1]).glob("*.pt"))
    assert files == ["rank0.pt", "rank1.pt"]
