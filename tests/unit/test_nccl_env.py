"""NCCL's variables that a train function sets after the start."""

from __future__ import annotations

import pytest

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.worker import nccl_env
from ray_fracbackend.worker.state import STATE


@pytest.mark.parametrize(("has_communicator", "changes"), [(True, True), (False, True), (True, False)])
def test_late_variables_are_named(monkeypatch: pytest.MonkeyPatch, has_communicator: bool, changes: bool) -> None:
    """Those that are new, changed or gone, without their values; also if the train function fails."""
    for name in ("NCCL_KEPT", "NCCL_CHANGED", "NCCL_GONE"):
        monkeypatch.setenv(name, "1")
    logged: list[str] = []
    monkeypatch.setattr(nccl_env.logger, "warning", lambda text, *values: logged.append(text % values))
    monkeypatch.setattr(STATE, "nccl_env", nccl_env.nccl_env() if has_communicator else None)

    def train() -> None:
        with FracTorchConfig().train_func_context():
            monkeypatch.setenv("OTHER", "1")
            if changes:
                monkeypatch.setenv("NCCL_CHANGED", "2")
                monkeypatch.setenv("NCCL_NEW", "secret")
                monkeypatch.delenv("NCCL_GONE")
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert [text.partition(" after ")[0] for text in logged] == (
        ["the train function changed NCCL_CHANGED, NCCL_GONE, NCCL_NEW"] if has_communicator and changes else []
    )
