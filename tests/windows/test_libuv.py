"""No Windows build of torch has a libuv store, but several settings request one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.torch_version import TorchVersion

from tests.processes import free_port

pytestmark = pytest.mark.windows(reason="the store of torch's Windows builds")

WITHOUT_LIBUV = "use_libuv was requested but PyTorch was buil[dt] without libuv support"
A_MINUTE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.mark.parametrize("options", [{"use_libuv": True}, {}], ids=["use_libuv=True", "default"])
def test_a_direct_store_asks_for_libuv_by_default(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCPStore without use_libuv=False fails, whatever the value of USE_LIBUV."""
    monkeypatch.setenv("USE_LIBUV", "0")
    with pytest.raises(RuntimeError, match=WITHOUT_LIBUV):
        TCPStore("127.0.0.1", 0, 1, True, A_MINUTE, **options)
    assert not TCPStore("127.0.0.1", 0, 1, True, A_MINUTE, use_libuv=False).libuvBackend


BY_DEFAULT = TorchVersion(torch.__version__) < "2.7"


@pytest.mark.parametrize(
    ("use_libuv", "url", "asks"),
    [
        ("1", "env://", True),
        ("1", "tcp://127.0.0.1:{port}", True),
        ("1", "env://?use_libuv=0", False),
        ("0", "env://?use_libuv=1", True),
        (None, "env://?use_libuv=1", True),
        # torch 2.4 to 2.6 use libuv by default and fail; 2.7 and later do not use it on Windows.
        (None, "env://", BY_DEFAULT),
    ],
)
def test_a_stock_start_that_asks_for_libuv_fails(
    use_libuv: str | None, url: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL takes precedence over the variable."""
    if use_libuv is not None:
        monkeypatch.setenv("USE_LIBUV", use_libuv)
    start = rendezvous(url.format(port=free_port()), 0, 1, timeout=A_MINUTE)
    if asks:
        with pytest.raises(RuntimeError, match=WITHOUT_LIBUV):
            next(iter(start))
    else:
        store, _, _ = next(iter(start))
        store.set("key", "value")
        assert store.get("key") == b"value"
