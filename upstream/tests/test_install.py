"""Pieces go in whole and come out whole."""

import importlib
import sys

import pytest

from upstream.install import as_if_merged
from upstream.seams import PIECES

from ray.train.torch.config import TorchConfig, _TorchBackend

_SEAMS = [
    pytest.param(seam, id=f"{name}-{seam.target.partition(':')[2]}")
    for name, piece in PIECES.items()
    for seam in piece.seams
]


@pytest.mark.parametrize("seam", _SEAMS)
def test_seams_exist(seam):
    """Every name that a piece replaces is there in this Ray, and so is its wrapper."""
    if ".rllib." in seam.target:
        pytest.importorskip("gymnasium", reason="ray[rllib] is not installed")
    for path in (seam.target, seam.wrapper):
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)


def test_names_are_put_back():
    """After the context every name has its own value again, after an error too."""
    module = sys.modules["ray.train.torch.config"]
    before = _TorchBackend.on_start, module.ray
    with pytest.raises(KeyError):
        with as_if_merged("shared_device", "bounded_start"):
            assert _TorchBackend.on_start is not before[0]
            assert module.ray is not before[1]
            raise KeyError
    assert (_TorchBackend.on_start, module.ray) == before


def test_requirements_come_along():
    """A piece that builds on another brings it, first and once."""
    with as_if_merged("shared_device", "gloo_default") as runtime_env:
        assert "gloo_default,shared_device" in runtime_env["env_vars"].values()


def test_unknown_piece():
    """A wrong name is an error that lists the right ones."""
    with pytest.raises(ValueError, match="no piece 'nothing'; there are gloo_default"):
        with as_if_merged("nothing"):
            pass


def test_public_surface_is_unchanged():
    """With all pieces of Ray Train, a config has its fields, defaults and backend."""
    with as_if_merged("shared_device", "bounded_start"):
        config = TorchConfig()
        assert config.to_dict() == {
            "backend": None,
            "init_method": "env",
            "timeout_s": 1800,
        }
        assert config.backend_cls is _TorchBackend
