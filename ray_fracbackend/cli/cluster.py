"""Connection to a Ray cluster and progress bar for commands. Runs on the driver; imports Ray when a function needs it."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_fracbackend.cli.reach import ClusterError as ClusterError  # for commands
from ray_fracbackend.cli.reach import authentication_error, check_head_node
from ray_fracbackend.timeouts import Deadline, bounded

if TYPE_CHECKING:
    import ray

_POLL_S = 0.5
# Until a bar is drawn.
_DELAY_S = 2.0
_FORMAT = "an address is HOST:PORT, ray://HOST:PORT or auto"
_STARTS_ONE = "no running Ray cluster found: starting a local one for this command (--address names a cluster)"
# What Ray's C++ client writes to standard error, and what it means.
_CAUSES = (
    (r"Unauthenticated|InvalidAuthToken|authentication token", "authentication"),
    (r"http2 header with status|http1\.x server|HTTP/1\.", "not_ray"),
    (r"[Vv]ersion mismatch", "version_mismatch"),
)


@dataclass(frozen=True)
class _Target:
    """A cluster to connect to.

    Attributes:
        address: As ``ray.init`` takes it.
        text: The address in messages, with where it comes from.
        host_port: Host and port of it, None where Ray looks for the cluster itself.
        automatic: Nobody named it: it is the cluster of this machine.
    """

    address: str
    text: str
    host_port: tuple[str, int] | None = None
    automatic: bool = False

    @property
    def is_local(self) -> bool:
        """True where Ray is started for this command."""
        return self.address == "local"


@contextmanager
def connected(address: str | None, timeout_s: float = 30.0) -> Iterator[bool]:
    """Connect to a cluster, or start Ray on this machine as ``ray.init()`` does, and disconnect at the end.

    A local Ray that starts is announced on standard error, and not bounded by ``timeout_s``.

    Args:
        address: As ``ray.init`` takes it; None for the running cluster that ``ray.init()`` would find, else a local one.
        timeout_s: Bound on the connection in seconds.

    Yields:
        True where Ray was started for the block, False where it was running.

    Raises:
        ClusterError: There is no connection; ``reason`` says why.
    """
    target, deadline = _target(address), Deadline(timeout_s)
    if target.is_local and address is None and not os.environ.get("RAY_ADDRESS") and sys.stderr is not None:
        print(_STARTS_ONE, file=sys.stderr, flush=True)
    if target.host_port is not None:
        _check(target, deadline)
    _import_ray(target, deadline)
    import ray

    if ray.is_initialized():
        raise RuntimeError("this process already uses a Ray cluster: call ray.shutdown() first")
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _init(target, deadline)
        try:
            yield target.is_local
        finally:
            ray.shutdown()
    finally:
        _set_sigterm(sigterm)


def _import_ray(target: _Target, deadline: Deadline) -> None:
    """Import Ray in time, which takes seconds, and minutes on a cold file system. A local Ray has no bound of its own."""
    if target.is_local or "ray" in sys.modules:
        return
    try:
        bounded(lambda: importlib.import_module("ray"), deadline.left_s)
    except TimeoutError:
        text = f"{target.text}: a cluster answers, but the import of Ray did not end within {deadline.budget_s:.3g} s"
        raise ClusterError(f"{text}; raise --timeout-s", "no_answer") from None


def check_address(address: str | None, timeout_s: float = 30.0) -> None:
    """Check that a cluster answers at an address, without connecting to it and without importing Ray.

    Args:
        address: As in `connected`.
        timeout_s: Bound in seconds.

    Raises:
        ClusterError: It is not an address, or no cluster answers there.
    """
    target = _target(address)
    if target.host_port is not None:
        _check(target, Deadline(timeout_s))


def _target(address: str | None) -> _Target:
    """Resolve an address as ``ray.init`` does.

    Raises:
        ClusterError: It is not an address.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if address in (None, "auto") and named not in ("", "auto"):
        return _parsed(named, f"RAY_ADDRESS={named}")
    if address not in (None, "auto"):
        return _parsed(address or "", address or "")
    file = _address_file()
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeError):
        found = ""
    if found:
        host, _, port = found.rpartition(":")
        host_port = (host.strip("[]"), int(port)) if port.isdecimal() else None
        return _Target("auto", f"{found} (from {file})", host_port, automatic=True)
    wanted = "auto" if address == "auto" or named == "auto" else "local"
    return _Target(wanted, wanted, automatic=True)


def _parsed(address: str, text: str) -> _Target:
    if address == "local":
        return _Target(address, text)
    wrong = ClusterError(f"{text or repr(text)} is not the address of a Ray cluster: {_FORMAT}", "no_cluster")
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{text} is an HTTP address, as of Ray's dashboard or jobs API: {_FORMAT}; the cluster's own port is 6379 by default",
            "no_cluster",
        )
    found = re.fullmatch(r"(ray://)?(\[[^\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})(/.*)?", address)
    if not found or not 0 < int(found[3]) < 65536 or (found[4] and not found[1]):
        if "://" in address and not address.startswith("ray://"):
            return _Target(address, text)  # a connector of the user's own: Ray imports it by its scheme
        raise wrong
    return _Target(address, text, (found[2].strip("[]"), int(found[3])))


def _address_file() -> Path:
    """Return the file in which ``ray start`` records its cluster."""
    folder = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    return Path(folder or (tempfile.gettempdir() if sys.platform == "win32" else "/tmp"), "ray", "ray_current_cluster")


def _check(target: _Target, deadline: Deadline) -> None:
    assert target.host_port is not None
    try:
        check_head_node(*target.host_port, target.text, deadline.left_s, target.automatic)
    except ClusterError as error:
        if not target.automatic or error.reason != "no_cluster":
            raise
        # The file may be that of a cluster which is gone, beside one that runs.
        raise ClusterError(f"{error}; `ray stop` removes a file that is out of date", error.reason) from None


def _init(target: _Target, deadline: Deadline) -> None:
    """Run ``ray.init`` without its output.

    Raises:
        ClusterError: It failed, or did not end in time.
    """
    import ray

    def init() -> None:
        ray.init(address=target.address, log_to_driver=False, logging_level="ERROR")

    with own_sigterm(), _captured_stderr() as captured:
        try:
            if target.is_local:
                # In this thread: Linux ends Ray's processes together with the thread that started them.
                init()
            else:
                bounded(init, deadline.left_s)
        except TimeoutError:
            _leave(target)
            raise _not_joined(target, deadline, captured()) from None
        except Exception as error:  # a local Ray that does not start in time raises no class of its own
            ray.shutdown()
            raise _cluster_error(target, error, captured()) from error
        except BaseException:
            _leave(target)
            raise


def _leave(target: _Target) -> None:
    """End a ray.init that was interrupted; one that runs on in its thread may hold the lock of ray.shutdown."""
    import ray

    if target.is_local:
        ray.shutdown()
    else:
        atexit.unregister(ray.shutdown)


def _not_joined(target: _Target, deadline: Deadline, captured: str) -> ClusterError:
    known = _known(target, captured)
    return known or ClusterError(
        f"{target.text}: a cluster answers, but ray.init() did not end within {deadline.budget_s:.3g} s; a driver needs a Ray "
        f"node on its own machine (`ray start --address=...`), or a Ray Client server (ray://HOST:10001)",
        "no_answer",
    )


def _cluster_error(target: _Target, error: Exception, captured: str) -> ClusterError:
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "any running Ray instance" in said:
        fix = "start one with `ray start --head`, or name its address"
        return ClusterError(f"no Ray cluster runs on this machine; {fix}", "no_cluster")
    if target.is_local:
        fix = "try again when this machine is less busy, or name a running cluster"
        return ClusterError(f"Ray did not start on this machine: {said.rstrip('.')}; {fix}", "no_answer")
    known = _known(target, f"{error}\n{captured}")
    return known or ClusterError(f"no connection to Ray at {target.text}: {said}", "no_answer")


def _known(target: _Target, text: str) -> ClusterError | None:
    reason = next((reason for pattern, reason in _CAUSES if re.search(pattern, text)), None)
    if reason == "authentication":
        return authentication_error(target.text, target.automatic)
    if reason == "not_ray":
        return ClusterError(f"{target.text} is not a Ray cluster: an HTTP server or proxy answers", reason)
    if reason == "version_mismatch":
        versions = "; ".join(re.findall(r"(?:Ray|Python): \S+", text)) or "Ray's or Python's version differs"
        fix = "run this command with the cluster's versions of Ray and Python"
        return ClusterError(f"{target.text}: the cluster has other versions ({versions}); {fix}", reason)
    return None


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM: Ray sets two of its own, one in C++ that aborts.

    Without one, Ray's that ends the process in Python remains: killed by the signal itself, agents of a local Ray are left.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        # From Ray's handler, which ends the process with the signal's number.
        if error.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        _set_sigterm(signal.getsignal(signal.SIGTERM) if before is signal.SIG_DFL else before)


def _set_sigterm(handler: Any) -> None:
    # In C, other code may have set another one than Python knows.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Send file descriptor 2, that C++ writes to, to a file during the block.

    Yields:
        Returns what was written so far.
    """
    try:
        saved = os.dup(2)
    except OSError:  # closed
        yield lambda: ""
        return
    with tempfile.TemporaryFile() as file:

        def text() -> str:
            with suppress(OSError, ValueError):
                file.seek(0)
                return file.read().decode(errors="replace")
            return ""

        try:
            os.dup2(file.fileno(), 2)
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def wait(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float, what: str) -> set[ray.ObjectRef[Any]]:
    """Wait for results, with a progress bar.

    Args:
        refs: References to wait for.
        timeout_s: How long, in seconds.
        what: Label of the bar.

    Returns:
        The references that are still open.
    """
    import ray

    end, pending = time.monotonic() + timeout_s, list(refs)
    with progress(len(refs), what) as show:
        while pending and (left_s := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=min(_POLL_S, left_s))
            show(len(refs) - len(pending))
    return set(pending)


def root_cause(error: BaseException) -> BaseException:
    """Unwrap an error of Ray: a task's own error, that of V2's controller, or the cause of V1's."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError) and error.cause is not None:
        return root_cause(error.cause)
    inner = getattr(error, "controller_failure", None) or error.__cause__
    return root_cause(inner) if inner is not None else error


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Draw a bar on standard error while the block runs.

    Args:
        total: Steps in all.
        what: Label of the bar.

    Yields:
        A function to call with the number of steps that are done.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done: None
        return
    with tqdm(total=total, desc=what, disable=None, delay=_DELAY_S, leave=False) as bar:

        def show(done: int) -> None:
            bar.update(done - bar.n)

        yield show
