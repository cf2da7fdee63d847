"""Test a rank's device and its links to other nodes. Runs on the worker.

Each rank listens on its node's address and sends a block over each connection. It uses nothing that it receives there.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress

import torch

from ray_fracbackend.decide.error_texts import cause_of, says_nothing_of_device
from ray_fracbackend.start.isolation.faults import Findings
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.worker.network import route_address

# The block is more than one packet: some routes pass only small ones.
_NUM_WORDS = 4096
_MAX_CONNECTIONS = 256
_CAUSE_CHARS = 200


def open_listener(master_addr: str, word: bytes, life_s: float) -> tuple[str, int]:
    """Listen on this node's address on its route to rank 0, in a daemon thread.

    Args:
        master_addr: Address of rank 0's store for this rank, a literal IP.
        word: Random bytes of this search, of which the block consists.
        life_s: Seconds until the listener and its connections are closed.

    Returns:
        Literal IP and port.

    Raises:
        OSError: This node cannot listen on the address.
    """
    address = route_address(master_addr) or master_addr
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    threading.Thread(target=asyncio.run, args=(_serve(listener, word * _NUM_WORDS, life_s),), daemon=True).start()
    return address, listener.getsockname()[1]


async def _serve(listener: socket.socket, block: bytes, life_s: float) -> None:
    slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if slots.locked():
            writer.transport.abort()
            return
        async with slots:
            with suppress(OSError):
                writer.transport.set_write_buffer_limits(0)  # so drain waits until the system has all of it
                writer.write(block)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(send, sock=listener)
    await asyncio.sleep(life_s)
    server.close()


def run_tests(device: str, peers: Mapping[int, tuple[str, int]], word: bytes, timeout_s: float) -> Findings:
    """Test this rank's device, then all links at the same time.

    Args:
        device: torch device of the rank. A device that hangs keeps this call from returning.
        peers: IP and port of the peers, by rank.
        word: As in `open_listener`.
        timeout_s: Time limit for the links in seconds.
    """
    fault = _device_fault(torch.device(device))
    # In a thread, because the caller may be in an event loop.
    reached = bounded(lambda: asyncio.run(_reached(peers, word * _NUM_WORDS, timeout_s)), 2 * timeout_s)
    return Findings(device_fault=fault, links=reached)


async def _reached(peers: Mapping[int, tuple[str, int]], block: bytes, timeout_s: float) -> dict[int, bool]:
    async def is_reached(address: str, port: int) -> bool:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                return await reader.readexactly(len(block)) == block
            finally:
                writer.transport.abort()
        return False

    async def in_time(address: str, port: int) -> bool:
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(is_reached(address, port), timeout_s)
        return False

    return dict(zip(peers, await asyncio.gather(*(in_time(*peer) for peer in peers.values())), strict=True))


def _device_fault(device: torch.device) -> str:
    """Return how the device failed, an empty string if it did not or could not be tested."""
    try:
        torch.empty(1, device=device)
        # Work of the failed start may still wait on the current stream.
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()  # type: ignore[no-untyped-call]
        with stream:
            return "" if sums_are_right(device) else "wrong sums"
    except (RuntimeError, AssertionError) as error:  # RuntimeError of CUDA, AssertionError of a CPU-only build
        return "" if says_nothing_of_device(error) else cause_of(error)[:_CAUSE_CHARS]


def sums_are_right(device: torch.device) -> bool:
    """Return whether this device computes products of integers correctly."""
    size = 256
    row = torch.arange(size, dtype=torch.float64, device=device) % 7 + 1
    matrix = row.repeat(size, 1)
    for factor in range(1, 4):
        # Every element of row i, column j is (sum of the row) * row[j].
        expected = row.cpu().sum().item() * factor * row.cpu()
        if not torch.equal((matrix * factor @ matrix).cpu(), expected.repeat(size, 1)):
            return False
    return True
