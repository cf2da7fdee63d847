"""Start, train and checkpoint with two CPU workers, on every system; the Windows jobs of CI run this.

python ci/start_smoke.py                     plain, then with USE_LIBUV=1 inherited
python ci/start_smoke.py --hosts-alias       also with a foreign alias of 127.0.0.1 in the hosts file, if it is writable
python ci/start_smoke.py --expect-no-gloo    torch without a Gloo transport: the start must fail and state what to install
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 300
ALIAS = "foreign-alias.test"
_SYSTEM = Path(os.environ.get("SYSTEMROOT", "C:/Windows"), "System32/drivers")
HOSTS = (_SYSTEM if sys.platform == "win32" else Path("/")) / "etc/hosts"


def train() -> None:
    """Sum the ranks on all ranks; every rank reports the same checkpoint file."""
    import torch
    import torch.distributed as dist
    from ray.train import Checkpoint

    from ray_fracbackend import report_rank0

    tensor = torch.full((1024,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"sum": tensor}, Path(folder, "model.pt"))
        report_rank0({"sum": tensor[0].item()}, Checkpoint.from_directory(folder))


def once() -> None:
    import ray
    import torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_fracbackend import FracTorchConfig

    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, ray {ray.__version__}, {sys.platform}", flush=True
    )
    ray.init("local", num_cpus=3, include_dashboard=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as storage:
        result = TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=FracTorchConfig(),
            run_config=RunConfig(name="smoke", storage_path=storage),
        ).fit()
        if result.metrics["sum"] != 3.0:
            raise SystemExit(f"the ranks added up to {result.metrics['sum']}, not to 3")
        with result.checkpoint.as_directory() as folder:
            if not Path(folder, "model.pt").is_file():
                raise SystemExit(f"no model.pt in the checkpoint: {os.listdir(folder)}")
    ray.shutdown()
    print("trained and stored", flush=True)


def run(name: str, **variables: str) -> tuple[int, str]:
    print(f"--- {name}", flush=True)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **variables}
    command = [sys.executable, str(Path(__file__).resolve()), "--once"]
    done = subprocess.run(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(done.stdout, flush=True)
    return done.returncode, done.stdout


@contextmanager
def hosts_alias() -> Iterator[None]:
    """Put a foreign name for 127.0.0.1 first in the hosts file, like games and container tools do."""
    path = HOSTS
    before = path.read_bytes()
    path.write_bytes(f"127.0.0.1 {ALIAS}\n".encode() + before)
    try:
        yield
    finally:
        path.write_bytes(before)


def try_alias() -> None:
    if not HOSTS.exists() or not os.access(HOSTS, os.W_OK):
        print(
            f"--- a foreign alias of 127.0.0.1: not tried, {HOSTS} cannot be written; run as administrator", flush=True
        )
        return
    with hosts_alias():
        try:
            socket.gethostbyname(ALIAS)
        except OSError as error:
            print(
                f"--- a foreign alias of 127.0.0.1: not tried, this system does not use {HOSTS} ({error})", flush=True
            )
            return
        must_train("a foreign alias of 127.0.0.1")


def must_train(name: str, **variables: str) -> None:
    code, _ = run(name, **variables)
    if code != 0:
        raise SystemExit(f"{name}: the run ended with {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hosts-alias", action="store_true")
    parser.add_argument("--expect-no-gloo", action="store_true")
    options = parser.parse_args()
    if options.once:
        once()
        return
    if options.expect_no_gloo:
        code, output = run("torch without a Gloo transport")
        if code == 0 or "2.7.1 or older, or 2.11.0 or newer" not in output:
            raise SystemExit("a torch without a Gloo transport must end in an error that names the versions to install")
        return
    must_train("plain")
    must_train("USE_LIBUV=1 inherited", USE_LIBUV="1")
    if options.hosts_alias:
        try_alias()


if __name__ == "__main__":
    main()
