"""How fast is the ipc backend beside Gloo, NCCL, Open MPI, DeepSpeed and a plain copy, on this machine?

    python -m benchmarks.ipc [--ranks 2 4] [--busy 0 1 2] [--device cuda] [--rounds 3] [--starts 5] [--out FOLDER]

Run it in the project's folder on a quiet machine. It prints medians and writes a dated JSON for collectives and one for
steps and cold calls, with hardware, versions and load, and their plots (needs matplotlib). The files also contain the
share of other processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, save
from benchmarks.ipc import COLD, COLLECTIVES, OPERATIONS, SIZES, STEPS, figure
from benchmarks.ipc.measure import measure
from ray_fracbackend.ipc import host_memory_support

_ELEMENT_BYTES = 4
# Memory of a case: inputs and outputs of each backend, and parameters, gradients and buckets of each backend's step.
_TENSORS_PER_RANK = 9
# Results by the beginning of their file's name.
_KINDS = {"ipc": COLLECTIVES, "ipc_training": (*STEPS, COLD)}


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _number_or_none(text: str) -> int:
    return 0 if text == "0" else _number(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=_number, nargs="+", default=[2, 4], help="processes; each number is measured on its own")
    add(
        "--busy",
        type=_number_or_none,
        nargs="+",
        default=[0],
        help="endless loops beside them, as busy data loader workers are; likewise",
    )
    add("--sizes", type=_number, nargs="+", help="bytes of the float32 tensors (default: some for each operation)")
    add("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    add("--rounds", type=_number, default=3, help="of one start")
    add("--starts", type=_number, default=5, help="of the processes; medians are over all rounds of all")
    add("--tries", type=_number, default=8, help="of a case, until other processes leave the machine alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all ranks on the first device")
    add("--out", type=Path, default=RESULTS, help="folder for the JSON and its plot (default: benchmarks/results)")
    options = parser.parse_args()
    sizes = options.sizes or [size for operation in options.operations for size in SIZES[operation]]
    if reason := why_not(options.ranks, sizes, options.device, options.out):
        parser.error(reason)
    return options


def why_not(ranks: list[int], sizes: list[int], device: str, out: Path) -> str | None:
    """Return why a measurement cannot run, before it takes minutes: value, rule and fix; None if it can run."""
    if missing := host_memory_support():
        return f"the ipc backend cannot run here: {missing}"
    if device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch sees no CUDA device here; ray-fracbackend doctor says why"
    least, most = _ELEMENT_BYTES * max(ranks), max(sizes) * max(ranks) * _TENSORS_PER_RANK
    if min(sizes) < least:
        return f"--sizes {min(sizes)}: must be at least {least}, a float32 for each of {max(ranks)} ranks"
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(0)[0]
    if most > free:
        return (
            f"--sizes {max(sizes)} with {max(ranks)} ranks: needs {_gib(most)} of memory, and {_gib(free)} are free; "
            "ask for smaller sizes or fewer ranks"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out}: {error.strerror}; name a folder of yours"
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def main() -> None:
    options = _options()
    with tqdm(disable=None) as bar:

        def show(done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_description(what, refresh=False)
            bar.update(done - bar.n)

        try:
            result = measure(
                options.ranks,
                busy=options.busy,
                operations=options.operations,
                sizes=options.sizes,
                rounds=options.rounds,
                starts=options.starts,
                tries=options.tries,
                device=options.device,
                progress=show,
            )
        except RuntimeError as error:  # a rank failed
            sys.exit(str(error))
    print(figure.table(result))
    for kind, operations in _KINDS.items():
        if rows := [row for row in result["rows"] if row["operation"] in operations]:
            path = save(kind, options.out, {**result, "rows": rows})
            figure.draw(json.loads(path.read_text()), path.with_suffix(".png"))
            print(f"written to {path} and beside it")


if __name__ == "__main__":
    main()
