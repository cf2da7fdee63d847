"""Record torch's error messages for failures of CUDA, on the emulated runtime, for the unit tests.

usage: python ci/cuda_texts.py          writes tests/unit/cuda_texts.json, in some minutes

The emulated runtime (ci/cuda.py) returns the error numbers, with the names and texts of the real runtime. The script
records how torch reports them. For each torch and each step of tests/cuda/cuda_steps.py it records the first step that
fails, with type and text of its error, or that none fails. For each CUDA_VISIBLE_DEVICES on a machine with two GPUs it
records torch's device count and the error of torch.cuda.init().
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from common import ROOT
from cuda_setup import CELLS

sys.path.insert(0, str(ROOT))
from tests.cuda.cuda_steps import CASES

FILE = ROOT / "tests" / "unit" / "cuda_texts.json"
_LIMIT_S = 300
_UUID = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
_VISIBLE = ("", "-1", "0", "1", "2", "0,0", "0,9,1", "9,0", "NoDevFiles", "GPU-0123abcd", "GPU-a0a1a2a3", _UUID)
_START = """
import json, torch
try:
    error = torch.cuda.init()
except Exception as failed:
    error = str(failed)
print(json.dumps({"count": torch.cuda.device_count(), "error": error}))
"""


def ask(torch: str, options: list[str], command: list[str], **env: str) -> dict[str, Any]:
    """Return the output of a program, one line of JSON."""
    variables = [f"{name}={value}" for name, value in env.items()]
    words = [sys.executable, str(ROOT / "ci" / "cuda.py"), "--torch", torch, *options]
    words += ["env", "--unset=CUDA_VISIBLE_DEVICES", *variables, *command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"ci/cuda_texts.py: {words} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"torch {torch}, {env}: {answer}", flush=True)
    return answer


def record(torch: str) -> dict[str, Any]:
    """Return all records of one torch release."""
    errors, version = {}, ""
    for name, case in CASES.items():
        found = ask(torch, [], ["python", "-m", "tests.cuda.cuda_steps", name], **case.env)
        version = found.pop("torch")
        errors[name] = found
    start = ["python", "-c", _START]
    visible = {value: ask(torch, ["--devices", "2"], start, CUDA_VISIBLE_DEVICES=value) for value in _VISIBLE}
    return {"version": version, "errors": errors, "visible": visible}


def main() -> None:
    texts = {torch: record(torch) for torch in CELLS}
    FILE.write_text(json.dumps(texts, indent=2) + "\n")


if __name__ == "__main__":
    main()
