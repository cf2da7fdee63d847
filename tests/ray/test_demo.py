"""The demo as a user runs it."""

import signal
import subprocess
import sys
import threading

import pytest
import ray

from ray_fracbackend.cli import demo
from tests.processes import with_signals


def run(*arguments):
    command = [sys.executable, "-m", "ray_fracbackend", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.full(but="V2")
def test_demo():
    """It prints share map, choice, figures and epochs, ends above 0.9, and loads rank 0's checkpoint back."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    done = run("demo", "--epochs", "4")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "shared with" in shown
    assert "verified in" in shown
    assert "epoch  4/4: loss" in shown
    assert float(done.stdout.rsplit("accuracy ", 1)[1]) > 0.9


@pytest.mark.full
def test_stock_demo_fails_without_gpus():
    """--stock shows what Ray's own TorchConfig does on the same cluster."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: stock's failure on it is a test of the gpu suite")
    done = run("demo", "--stock", "--epochs", "1")
    assert done.returncode == 1
    assert "training failed" in done.stderr
    assert "NCCL" in done.stderr or "CUDA" in done.stderr


@pytest.mark.full
@pytest.mark.linux(reason="signals are those of Unix")
@pytest.mark.parametrize("end", ["interrupt", "closed pipe"])
def test_a_demo_that_is_not_watched_to_its_end(end):
    """Ctrl-C in the middle of the training, and an output that nobody reads: a line or silence, and the shell's exit codes."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    process = subprocess.Popen(
        with_signals(sys.executable, "-m", "ray_fracbackend", "demo", "--epochs", "1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("epoch  1/1000") for line in process.stdout)
    if end == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(100) == (130 if end == "interrupt" else 141)
    assert errors == ("ray-fracbackend: interrupted\n" if end == "interrupt" else "")


def test_an_interrupted_training_starts_no_ray(monkeypatch):
    """V1's fit() goes on in its thread, where its next call of Ray would start a new one after ray.shutdown()."""
    monkeypatch.setattr(ray, "init", lambda: "a new Ray")
    errors, interrupted, ended = [], threading.Event(), threading.Event()

    class Interrupted:
        """A display, and a trainer."""

        def show_while(self, thread):
            raise KeyboardInterrupt

        def fit(self):
            interrupted.wait(60)
            try:
                ray.init()
            except RuntimeError as error:
                errors.append(str(error))
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        demo._fit(Interrupted(), Interrupted())
    interrupted.set()
    assert ended.wait(60)
    assert errors == ["the run that this thread waited for was ended by ray.shutdown()"]
    assert ray.init() == "a new Ray"


@pytest.mark.full(but="V2")
@pytest.mark.parametrize("arguments", [[], ["nothing"], ["demo", "--epochs", "0"], ["demo", "--epochs", "x"]])
def test_wrong_usage(arguments):
    """Wrong usage is exit code 2 and says what is wrong."""
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
