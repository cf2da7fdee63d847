"""The demo as a user runs it."""

import signal
import subprocess
import sys

import pytest

from tests.processes import processes_with, wait_until, with_signals


def run(*arguments):
    command = [sys.executable, "-m", "ray_fracbackend", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.full
def test_demo():
    """It prints ranks, decision, measurements and epochs, reaches more than 0.9, and loads rank 0's checkpoint."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    done = run("demo", "--epochs", "4")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "rank 1 (node " in shown
    assert "verified in" in shown
    assert "epoch 4/4: loss" in shown
    assert float(done.stdout.rsplit("accuracy ", 1)[1]) > 0.9


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
def test_ctrl_c_during_the_training(monkeypatch, tmp_path):
    """One line and the shell's exit code, and nothing continues."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    monkeypatch.setenv("DEMO_TEST", str(tmp_path))
    process = subprocess.Popen(
        with_signals(sys.executable, "-m", "ray_fracbackend", "demo", "--epochs", "100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("training with two workers") for line in process.stdout)

    def workers():
        return [each for each in processes_with("DEMO_TEST", str(tmp_path)) if "RayTrainWorker" in each.name()]

    assert wait_until(lambda: len(workers()) == 2, 100)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "ray-fracbackend: interrupted\n" in errors
    assert "Traceback" not in errors
    assert wait_until(lambda: not processes_with("DEMO_TEST", str(tmp_path)), 60)
