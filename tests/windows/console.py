"""Run a script in this console, and end it when both of its workers train: by Ctrl-C, by Ctrl-Break, or as Task Manager does.

usage: python console.py C|BREAK|KILL FOLDER SCRIPT [ARGUMENT ...]     in a console of its own

A key reaches all processes of a console, as for a user. Prints the exit code of the script and the time until its end.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 300.0
END_S = 60.0


def main() -> None:
    key, folder, *command = sys.argv[1:]
    kernel = ctypes.WinDLL("kernel32")
    # A process that was started to ignore Ctrl-C would pass that on to its child processes.
    kernel.SetConsoleCtrlHandler(None, False)
    script = subprocess.Popen([sys.executable, *command])
    # Not signal.signal(), which blocks one kind of key with each call.
    keep = ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(lambda _: True)
    kernel.SetConsoleCtrlHandler(keep, True)
    end = time.monotonic() + START_S
    while not all(Path(folder, f"training.{rank}").exists() for rank in range(2)):
        if time.monotonic() > end or script.poll() is not None:
            script.kill()
            raise SystemExit(f"the workers do not train; the script ended with {script.wait()}")
        time.sleep(0.2)
    time.sleep(2.0)  # for V2 to have launched the train functions on all workers
    if key == "KILL":
        script.kill()
    else:
        os.kill(0, signal.CTRL_C_EVENT if key == "C" else signal.CTRL_BREAK_EVENT)
    pressed = time.monotonic()
    while script.poll() is None and time.monotonic() < pressed + END_S:
        time.sleep(0.1)
    print(f"ended {script.poll()} {time.monotonic() - pressed:.1f}", flush=True)
    script.kill()


if __name__ == "__main__":
    main()
