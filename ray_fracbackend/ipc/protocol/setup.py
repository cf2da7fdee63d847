"""Set up the shared memory of a group, whose ranks are on one host. Imports torch.

Each rank announces its host and process in the group's store. The first rank creates the memory, and the others open it. Each rank
allocates its own slots, which are so on its NUMA node. No rank continues until every rank of the group has reported that it is attached.
So either all ranks have the backend or all raise the same reason.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from .. import knobs
from .._torch import PrefixStore
from ..errors import IpcUnavailableError
from ..host.arena import TOKEN_BYTES, Arena, ArenaName, attach_arena, create_arena
from ..host.liveness import Peer, start_time
from ..host.memory import HostMemory, memory_bytes, share_bytes
from ..host.support import host_id, host_memory_support
from .collectives import Collectives
from .control import control_bytes
from .description import Terms
from .engine import Engine
from .local import LocalCollectives

_MESSAGE_BYTES = 4096
_MAX_ERROR = 1000
# Types of the values of each record in the store. Sizes are in the memory itself, to which only its ranks can write.
_ERROR = (str, type(None))
_HELLO = {"host": (str,), "pid": (int,), "started": (int, float), "error": _ERROR}
_ARENA = {"pid": (int,), "fd": (int,), "token": (str,), "num_bytes": (int,), "error": _ERROR}
_ATTACHED = {"error": _ERROR}
_NO_ARENA = ArenaName(-1, -1, "", 0)
_SIZES = struct.Struct("=3q")


def join(store: Any, rank: int, size: int, names: tuple[str, ...], obstacle: str | None = None) -> LocalCollectives:
    """Set up the shared memory of a group; every rank of the group must call it.

    Args:
        store: The group's own store (prefixed).
        rank: This process's rank in the group.
        size: Number of ranks of the group.
        names: Name of each group rank in messages: "rank" and its global rank.
        obstacle: Reason why this rank cannot take part; None to detect it.

    Raises:
        IpcUnavailableError: A rank cannot take part; the message has the rank and the reason.
    """
    store = PrefixStore("ipc", store)
    error = obstacle or host_memory_support()
    hello = {"host": host_id(), "pid": os.getpid(), "started": 0 if error else start_time(os.getpid()), "error": error}
    store.set(f"hello/{rank}", json.dumps(hello))
    engine, arena, infos = None, None, []
    try:
        infos = [_record(store, f"hello/{other}", _HELLO) for other in range(size)]
        if all(info["error"] is None for info in infos):
            if (num_hosts := len({info["host"] for info in infos})) > 1:
                raise IpcUnavailableError(
                    f"the ranks are on {num_hosts} hosts; use the staged or the gloo backend for them"
                )
            arena = _open_arena(store, rank, size)
            chunk_bytes, num_slots, one_pass_bytes = _sizes(arena, size)
            data = torch.frombuffer(arena.memory, dtype=torch.uint8, offset=control_bytes(size))
            memory = HostMemory(data, chunk_bytes, _folded_bytes(chunk_bytes, size), num_slots, rank)
            for areas, num_bytes in (
                (memory.slot_addresses, chunk_bytes),
                (memory.folded_addresses, share_bytes(chunk_bytes, size)),
            ):
                os.posix_fallocate(arena.fd, areas[rank][0] - arena.address, num_slots * num_bytes)
            engine = Engine(arena, rank, [Peer(info["pid"], info["started"]) for info in infos], list(names), memory)
    except (IpcUnavailableError, OSError, ValueError) as failure:
        error = str(failure)
        if isinstance(failure, OSError):
            error = (
                f"the kernel did not provide the shared memory ({failure.strerror}); set {knobs.CHUNK_BYTES_ENV_VAR} or "
                f"{knobs.SLOTS_ENV_VAR} lower, or use the gloo backend"
            )
        if rank == 0:  # the others may wait for its memory
            store.set("arena", json.dumps({**asdict(_NO_ARENA), "error": error}))
    try:
        store.set(f"attached/{rank}", json.dumps({"error": error}))
        _raise_first_error([_record(store, f"attached/{other}", _ATTACHED) for other in range(size)], names)
        _raise_first_error(infos, names)
    finally:
        if arena is not None:
            os.close(arena.fd)
    if engine is None:
        raise IpcUnavailableError(f"The ipc backend cannot be used: {error}")
    return LocalCollectives(engine, one_pass_bytes)


def share(
    collectives: Collectives, names: Sequence[str], step: Callable[[], dict[str, Any]], terms: Terms
) -> list[dict[str, Any]]:
    """Run a setup step on this rank and exchange its result with all ranks, through existing collectives.

    Args:
        collectives: Collectives of CPU tensors.
        names: Name of each rank in messages.
        step: Returns this rank's message.
        terms: Terms of the exchange.

    Returns:
        The message of each rank.

    Raises:
        IpcUnavailableError: The step failed on a rank; every rank raises the reason of the first such rank.
    """
    try:
        message = step()
    except Exception as error:
        # torch appends lines with general advice to CUDA's own text.
        message = {"error": next(iter(str(error).strip().splitlines()), repr(error))}
    if message.get("error"):
        message = {"error": message["error"][:_MAX_ERROR]}
        # JSON needs six bytes for some characters.
        while len(json.dumps(message)) > _MESSAGE_BYTES:
            message["error"] = message["error"][:-100]
    data = json.dumps(message).encode().ljust(_MESSAGE_BYTES, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    table = torch.empty((len(names), _MESSAGE_BYTES), dtype=torch.uint8, device="cpu")
    collectives.gather(own, list(table), None, terms)
    answers = [_parsed(bytes(row.tolist()).rstrip(b"\0")) for row in table]
    for name, answer in zip(names, answers, strict=True):
        if answer.get("error"):
            raise IpcUnavailableError(f"{name}: {answer['error']}")
    return answers


def _record(store: Any, key: str, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return a record of the store, to which not only the ranks can write.

    Raises:
        IpcUnavailableError: It has other names or types.
    """
    record = _parsed(text := bytes(store.get(key)))
    if record.keys() == types.keys() and all(type(record[name]) in types[name] for name in types):
        return record
    raise IpcUnavailableError(
        f"{key} in the store is no record of a rank: {text[:80]!r}. Something else writes to this store."
    )


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object, or one with an error if it is none."""
    with suppress(ValueError, RecursionError):
        record = json.loads(text)
        if isinstance(record, dict):
            return record
    return {"error": f"no record of a rank: {text[:80]!r}"}


def _raise_first_error(infos: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    failed = [(names[r], info["error"][:_MAX_ERROR]) for r, info in enumerate(infos) if info["error"] is not None]
    if failed:
        others = f" ({len(failed)} ranks in total)" if len(failed) > 1 else ""
        raise IpcUnavailableError(f"The ipc backend cannot be used: {failed[0][0]}{others}: {failed[0][1]}")


def _folded_bytes(chunk_bytes: int, num_ranks: int) -> list[int]:
    return [share_bytes(chunk_bytes, num_ranks)] * num_ranks


def _arena_bytes(num_ranks: int, chunk_bytes: int, num_slots: int) -> int:
    return control_bytes(num_ranks) + memory_bytes(chunk_bytes, _folded_bytes(chunk_bytes, num_ranks), num_slots)


def _open_arena(store: Any, rank: int, size: int) -> Arena:
    """Create or attach the group's arena.

    Raises:
        IpcUnavailableError: This process cannot open the memory.
        OSError: The kernel does not provide it.
        ValueError: The user set an invalid value of a size.
    """
    if rank == 0:
        sizes = knobs.chunk_bytes(), knobs.num_slots(), knobs.one_pass_bytes(size)
        arena, name = create_arena(_arena_bytes(size, *sizes[:2]), control_bytes(size))
        _SIZES.pack_into(arena.memory, TOKEN_BYTES, *sizes)
        store.set("arena", json.dumps({**asdict(name), "error": None}))
        return arena
    announced = _record(store, "arena", _ARENA)
    if (error := announced.pop("error")) is not None:
        raise IpcUnavailableError(error)
    return attach_arena(ArenaName(**announced))


def _sizes(arena: Arena, size: int) -> tuple[int, int, int]:
    """Return the size and number of the slots, and the largest all_reduce in one pass, in bytes.

    Raises:
        ValueError: The memory is for another number of ranks.
    """
    sizes: tuple[int, int, int] = _SIZES.unpack_from(arena.memory, TOKEN_BYTES)
    if len(arena.memory) != _arena_bytes(size, *sizes[:2]):
        raise ValueError(f"the memory of rank 0 is not for {size} ranks")
    return sizes
