"""Simulate a step that breaks in the middle. usage: python3 ci/gpu_fault.py exception|kill|hang COMMAND ...

Runs the command until its first output or for two seconds, then ends itself in the given way and leaves the command
running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    kind, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    said = threading.Thread(target=process.stdout.readline, daemon=True)
    said.start()
    said.join(2)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(1e6)
    raise RuntimeError("a fault that was requested")


if __name__ == "__main__":
    main()
