"""Every value that comes out of a store or a socket, written by a stranger: an error with a next step, or no effect."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pickle
import re
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_fracbackend import IncompatibleWorkersError, RendezvousError, VerificationError, check_devices
from ray_fracbackend.ipc import IpcUnavailableError
from ray_fracbackend.ipc.protocol import setup
from ray_fracbackend.ipc.protocol.gloo import GlooCollectives
from ray_fracbackend.start.isolation import rank_tests
from ray_fracbackend.verify import failure
from ray_fracbackend.worker import device_check, peers, process_group
from ray_fracbackend.worker.store import connect_store, open_store
from tests.unit.builders import gpu, worker, worker_plan

START_PAGE = Path(__file__).parents[2] / "docs/development/start.md"
VERSION, INFO = device_check.__version__, asdict(worker(1, gpu("a")))
GOOD = json.dumps({"error": None})
NAMES = ("rank 0", "rank 1")
NEXT = r"use a store that only these processes reach\.$|Install one version on every node|check the logs of the missing ranks"


class Stranger:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/dev/null/a stranger's code ran",)


@functools.cache
def local_store() -> dist.TCPStore:
    return open_store(host="127.0.0.1")


def store_with(values: dict[str, bytes | str]) -> dist.Store:
    store = dist.PrefixStore(uuid.uuid4().hex, local_store())
    for key, value in values.items():
        store.set(key, value)
    return store


def connected(value: bytes) -> None:
    with mock.patch.object(process_group.store.STATE, "store", store_with({"1/ray_fracbackend/connected/1": value})):
        connect_store(0, 2, "127.0.0.1", 1, 5.0, "1")


def failed(value: bytes) -> None:
    attempt, store = uuid.uuid4().hex, local_store()
    dist.PrefixStore(attempt, store).set("ray_fracbackend/failed", value)
    with pytest.raises(RendezvousError) if value == b"0" else nullcontext():
        peers.Peers(worker_plan(rank=1, master_port=store.port, attempt=attempt)).look()


def tried(value: bytes) -> None:
    store, plan = store_with({"ray_fracbackend/tried/1": value}), worker_plan(is_trial=True)
    with (
        mock.patch.multiple(process_group, _form=mock.DEFAULT, end_process_group=mock.DEFAULT),
        mock.patch.dict(os.environ, {process_group._HANDLING: "1"}),
        pytest.raises(VerificationError) as caught,
    ):
        process_group._try_nccl(plan, store, SimpleNamespace(left_s=5.0))  # type: ignore[arg-type]
    assert caught.value.ranks == (1,)


def record(value: bytes) -> None:
    verification = SimpleNamespace(store=store_with({"1": value}), rank=0, world_size=2, global_ranks=[0, 1])
    assert failure._looked_up(verification) == []  # type: ignore[arg-type]


def checked(rank: int, key: str, value: bytes) -> None:
    store = store_with({f"ray_fracbackend/check_devices/2/1/{key}": value})
    with (
        mock.patch.object(device_check, "_probe_process", lambda rank, device: worker(rank, gpu("a"))),
        mock.patch.object(device_check, "_ANSWER_S", 0.0),
        pytest.raises((RendezvousError, IncompatibleWorkersError), match=NEXT),
    ):
        check_devices(store=store, rank=rank, world_size=2, timeout_s=5)


def joined(rank: int, key: str, value: bytes) -> None:
    """The error names the record; nothing was opened."""
    hello = json.dumps({"host": setup.host_id(), "pid": os.getpid(), "started": 1, "error": None})
    values = {f"hello/{1 - rank}": hello, f"attached/{1 - rank}": GOOD, key: value}
    with (
        mock.patch.dict(os.environ, {"RAY_FRACBACKEND_IPC_CHUNK_BYTES": "65536", "RAY_FRACBACKEND_IPC_SLOTS": "2"}),
        mock.patch.object(setup, "PrefixStore", lambda prefix, store: store),
        pytest.raises(IpcUnavailableError, match=r"(in the store is|rank 1:) no record of a rank: "),
    ):
        setup.join(store_with(values), rank, 2, NAMES)


@pytest.mark.linux(reason="ipc needs it")
@pytest.mark.parametrize("error", [None, "forged"])
def test_a_record_of_the_right_form(error: str | None) -> None:
    """Ranks that count different members have an error, and tell it; a forged one without a rank that has it is an error too."""
    hello = json.dumps({"host": setup.host_id(), "pid": os.getpid(), "started": 1, "error": error})
    arena, name = setup.create_arena(setup._arena_bytes(3, 1 << 16, 2))
    setup._SIZES.pack_into(arena.memory, setup.TOKEN_BYTES, 1 << 16, 2, 1)
    announced = json.dumps({**asdict(name), "error": None})
    store = store_with({"hello/0": hello, "arena": announced, "attached/0": GOOD})
    with (
        mock.patch.object(setup, "PrefixStore", lambda prefix, store: store),
        pytest.raises(IpcUnavailableError, match=error or "rank 1: the memory of rank 0 is not for"),
    ):
        setup.join(store, 1, 2, NAMES)
    os.close(name.fd)
    assert (json.loads(store.get("attached/1"))["error"] is None) == bool(error)


def said(value: bytes) -> None:
    """It is only text in the message of an error."""
    group = GlooCollectives.__new__(GlooCollectives)
    group._store = store_with({"failed": value})
    assert group._posted("failed") == value.decode("utf-8", "replace")


def shared(value: bytes) -> None:
    """A JSON object is the message of a rank, anything else an error."""

    def gather(own: Any, rows: list[torch.Tensor], *_: Any) -> None:
        for row in rows:
            row.copy_(torch.frombuffer(bytearray(value[:4096].ljust(4096, b"\0")), dtype=torch.uint8))

    with suppress(IpcUnavailableError):
        answers = setup.share(SimpleNamespace(gather=gather), NAMES, dict, None)  # type: ignore[arg-type]
        assert {*map(type, answers)} == {dict}


def block(value: bytes) -> None:
    """A listener that sends something else counts as not reached."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: server.accept()[0].sendall(value))
        peer = {1: server.getsockname()}
        assert asyncio.run(rank_tests._reached(peer, b"16 random bytes." * 4096, 5.0)) == {1: False}


READ = {
    "ray_fracbackend/connected/RANK": connected,
    "ray_fracbackend/failed": failed,
    "ray_fracbackend/tried/RANK": tried,
    "RANK of a verification": record,
    "ray_fracbackend/check_devices/rank/RANK": functools.partial(checked, 0, "rank/1"),
    "ray_fracbackend/check_devices/answer": functools.partial(checked, 1, "answer"),
    "ipc/hello/RANK": functools.partial(joined, 0, "hello/1"),
    "ipc/arena": functools.partial(joined, 1, "arena"),
    "ipc/attached/RANK": functools.partial(joined, 0, "attached/1"),
    "gloo-collectives/failed": said,
    "messages of a set-up": shared,
    "block of the search": block,
}


def test_the_page_lists_them() -> None:
    """What else is read from a store or a socket has to come into the table, and into this test."""
    table = START_PAGE.read_text().partition("| Value | Written by |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `?([^|`]+)`? \|", table, re.MULTILINE) == list(READ)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)
RECORDS = st.sampled_from([setup._HELLO, setup._ARENA, setup._ATTACHED]).flatmap(
    lambda types: st.fixed_dictionaries(dict.fromkeys(types, PLAIN)).filter(
        lambda record: any(type(record[name]) not in kinds for name, kinds in types.items())
    )
)


@pytest.mark.linux(reason="ipc needs it")
@pytest.mark.parametrize("name", READ)
@settings(max_examples=40, deadline=None)
@given(st.binary() | (PLAIN | RECORDS).map(lambda value: json.dumps(value).encode()))
@example(pickle.dumps(Stranger()))
@example(b"[" * 100_000)
@example(b"9" * 5_000)
@example(b"0")
@example(json.dumps([VERSION, INFO]).encode())
@example(json.dumps({"pid": "self", "fd": "../../../etc/passwd", "token": "", "num_bytes": 1, "error": None}).encode())
def test_a_value_of_a_stranger(name: str, value: bytes) -> None:
    """Nothing of it is executed or opened, and each reader says what it is, or goes on."""
    READ[name](value)
