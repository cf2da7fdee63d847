"""One gRPC call to the head node of a Ray cluster, before Ray itself connects. Runs on the driver; standard library only.

Ray's own client retries for minutes where a port is not Ray's or a token is refused, writes its warnings to the terminal, and
cannot be interrupted. This call is over with the first answer: the cluster id that Ray's client asks for first as well
(GetClusterId, Ray 2.40 to 2.60), as HTTP/2 frames (RFC 9113) with headers that need no compression (RFC 7541).
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from ray_fracbackend.timeouts import Deadline, bounded

TOKEN_SETTINGS = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_UNAUTHENTICATED = 16
# A server that is slower than this does not serve a driver either.
_ANSWER_S = 10.0
_MAX_FRAME_BYTES = 1 << 14
# HTTP status other than 200, as an index of HPACK's static table.
_NOT_200 = frozenset(b"\x89\x8a\x8b\x8c\x8d\x8e")


class ClusterError(ConnectionError):
    """There is no connection to a Ray cluster.

    Args:
        message: One line with address, cause and fix.
        reason: ``no_cluster``, ``authentication``, ``not_ray``, ``no_answer`` or ``version_mismatch``.

    Attributes:
        reason: As given.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_head_node(host: str, port: int, what: str, timeout_s: float, automatic: bool = False) -> None:
    """Check that a Ray cluster answers at an address and accepts this process's token; an unclear answer is accepted.

    Args:
        host: Name or address of the head node.
        port: Port of the GCS, or of a Ray Client server.
        what: The address in error messages.
        timeout_s: Bound in seconds.
        automatic: The address comes from this machine, not from the user: Ray then sends the token by default.

    Raises:
        ClusterError: Nothing listens there, it is not Ray, it does not answer, or it refuses the token.
    """
    deadline = Deadline(min(timeout_s, _ANSWER_S))
    found = _connected(host, port, what, deadline)
    if _truth("RAY_USE_TLS"):
        found.close()
        return
    token = token_to_send(automatic)
    try:
        with found:
            found.sendall(_request(f"{host}:{port}", token))
            status = _grpc_status(found, deadline)
    except TimeoutError:
        cause = f"the port accepts connections and sends nothing within {deadline.budget_s:.3g} s"
        fix = (
            "check that the head node is not overloaded or stopped, and that the port is the one of `ray start --head`"
        )
        raise ClusterError(f"{what}: {cause}; {fix}", "no_answer") from None
    except (_NotRay, ConnectionError) as error:
        fix = "name the port that `ray start --head` prints (6379 by default), not the dashboard's (8265)"
        cause = str(error) if isinstance(error, _NotRay) else f"it breaks the connection off ({_cause(error)})"
        raise ClusterError(f"{what} is not a Ray cluster: {cause}; {fix}", "not_ray") from None
    except OSError as error:
        raise ClusterError(
            f"{what}: the connection broke ({_cause(error)}); look at the head node", "no_answer"
        ) from None
    if status == _UNAUTHENTICATED and os.environ.get("RAY_AUTH_MODE", "").lower() in ("", "disabled", "token"):
        raise authentication_error(what, automatic)


def authentication_error(what: str, automatic: bool = False) -> ClusterError:
    """Return the error for a cluster that refuses this process's token, or its lack of one.

    Args:
        what: The address in error messages.
        automatic: As in `check_head_node`.
    """
    fix = f"with the cluster's token in {TOKEN_SETTINGS} (`ray get-auth-token` prints it on the head node)"
    if token_to_send(automatic) is not None:
        text = f"refuses the token of {token_source()}; try again {fix}"
    elif not _mode_is_token(automatic):
        mode = os.environ.get("RAY_AUTH_MODE")
        why = f"with RAY_AUTH_MODE={mode}" if mode else "to this address while RAY_AUTH_MODE is not set"
        text = f"requires a token, and Ray sends none {why}; set RAY_AUTH_MODE=token, {fix}"
    else:
        text = f"requires a token, and there is none here; try again {fix}"
    return ClusterError(f"the Ray cluster at {what} {text}", "authentication")


def token_to_send(automatic: bool = False) -> str | None:
    """Return the token that Ray sends from this process, None where it sends none.

    Args:
        automatic: As in `check_head_node`.
    """
    return _token() if _mode_is_token(automatic) else None


def token_source() -> str | None:
    """Return the name of the setting that Ray takes the token from, None where there is no token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return f"RAY_AUTH_TOKEN_PATH={path}" if _read(Path(path)) else None
    return "~/.ray/auth_token" if _token() else None


def _mode_is_token(automatic: bool) -> bool:
    mode = os.environ.get("RAY_AUTH_MODE")
    return (automatic and _token() is not None) if mode is None else mode.lower() == "token"


def _token() -> str | None:
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    try:
        return _read(Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"))
    except RuntimeError:  # no home
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeError):
        return None


def _truth(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _connected(host: str, port: int, what: str, deadline: Deadline) -> socket.socket:
    """Connect; the look-up of a name has no timeout of its own."""
    try:
        return bounded(lambda: socket.create_connection((host, port), timeout=deadline.left_s), deadline.left_s)
    except TimeoutError:
        fix = "check the address, the firewall and the head node"
        raise ClusterError(f"{what}: no answer within {deadline.budget_s:.3g} s; {fix}", "no_answer") from None
    except socket.gaierror as error:
        raise ClusterError(
            f"no Ray cluster at {what}: the name does not resolve ({error.strerror})", "no_cluster"
        ) from None
    except (OSError, UnicodeError, OverflowError) as error:
        fix = "start one there with `ray start --head`, or correct the address"
        raise ClusterError(f"no Ray cluster at {what}: {_cause(error)}; {fix}", "no_cluster") from None


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _NotRay(Exception):
    """What answers is not a gRPC server."""


def _request(authority: str, token: str | None) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _CALL,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **({"authorization": f"Bearer {token}"} if token else {}),
    }
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in headers.items())
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, bytes(5))  # an empty protobuf message, not compressed
    )


def _string(text: str) -> bytes:
    """Encode a header's name or value without Huffman coding."""
    data = text.encode("latin-1", "replace")
    number, head = len(data), bytearray()
    if number < 127:
        return bytes([number]) + data
    head.append(127)
    number -= 127
    while number >= 128:
        head.append(number % 128 + 128)
        number //= 128
    return bytes([*head, number]) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def _grpc_status(connection: socket.socket, deadline: Deadline) -> int | None:
    """Return gRPC's status of the answer, None where the frames do not show it.

    Raises:
        TimeoutError: There is no answer in time.
        _NotRay: The answer is not gRPC's.
    """
    for kind, flags, payload in _frames(connection, deadline):
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind in (_HEADERS, _CONTINUATION):
            if payload[:1] and payload[0] in _NOT_200:
                raise _NotRay("an HTTP server answers, with another status than 200")
            # gRPC's own library writes this header without Huffman coding.
            if found := re.search(rb"grpc-status[\x01\x02](\d{1,2})", payload):
                return int(found[1])
            if flags & _END_STREAM:
                return None
        elif kind in (_RST_STREAM, _GOAWAY):
            return None
    return None


def _frames(connection: socket.socket, deadline: Deadline) -> Iterator[tuple[int, int, bytes]]:
    first = True
    while head := _received(connection, 9, deadline, first):
        if first and (len(head) < 9 or head[3] != _SETTINGS):
            raise _NotRay(_greeting(head))
        if len(head) < 9:
            return
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        first = False
        yield kind, flags, _received(connection, min(size, _MAX_FRAME_BYTES), deadline)


def _greeting(head: bytes) -> str:
    if head.startswith((b"HTTP/", b"<")):  # HTTP/0.9 has no status
        return "an HTTP server answers"
    text = head.decode("ascii", "replace")
    return f"a server answers that does not speak gRPC ({text!r} ...)"


def _received(connection: socket.socket, size: int, deadline: Deadline, first: bool = False) -> bytes:
    """Receive so many bytes, or fewer where the connection ends."""
    data = b""
    while len(data) < size:
        connection.settimeout(deadline.left_s)
        part = connection.recv(size - len(data))
        if not part:
            if first and not data:
                raise _NotRay("the server closes the connection without an answer")
            break
        data += part
    return data
