"""The examples and the README's first example run, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "examples" / "digits.py"
FILES = ["curve.png", "predictions.png", "weights.safetensors"]


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a child process that finds this source tree; return what it did."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_digits(folder: Path, *flags: object) -> str:
    """Run the digits example and return what it printed."""
    done = run(DIGITS, "--threads", 1, "--output", "out", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar where there is no terminal, and no warnings
    return done.stdout


def reported_accuracy(printed: str) -> tuple[int, int]:
    """Return how many held-out digits were read correctly, of how many, as printed."""
    found = re.search(r"read correctly: ([\d.]+)% \((\d+) of (\d+)\)", printed)
    assert found, printed
    percent, right, total = float(found[1]), int(found[2]), int(found[3])
    assert percent == pytest.approx(100 * right / total, abs=0.005)
    return right, total


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the digits example printed with its default flags, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("digits")
    return run_digits(folder), folder / "out"


# ---- examples/digits.py ----------------------------------------------------------------------


def test_digits_reads_held_out_digits(digits: tuple[str, Path]) -> None:
    right, total = reported_accuracy(digits[0])
    assert total == 360
    assert right / total >= 0.97


def test_digits_writes_its_files_and_nothing_else(digits: tuple[str, Path]) -> None:
    from matplotlib import image

    printed, folder = digits
    assert sorted(path.name for path in folder.iterdir()) == FILES
    for name in FILES:
        assert name in printed
    for name in ("curve.png", "predictions.png"):
        pixels = image.imread(folder / name)[..., :3]  # (height, width, 3)
        assert min(pixels.shape[:2]) > 400
        assert pixels.min() < 0.2  # something is drawn
        assert pixels.max() == 1.0


def test_digits_weights_give_the_reported_accuracy_in_plain_numpy(
    digits: tuple[str, Path],
) -> None:
    from safetensors.numpy import load_file
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    printed, folder = digits
    images, labels = load_digits(return_X_y=True)
    _, h, _, labels = train_test_split(
        images / 16, labels, test_size=0.2, stratify=labels, random_state=0
    )
    weights = load_file(folder / "weights.safetensors")
    names = sorted(name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    assert names == ["0", "2", "4"]
    for name in names:
        h = h @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        if name != names[-1]:
            h = np.maximum(h, 0)
    assert (np.sum(h.argmax(axis=1) == labels), len(labels)) == reported_accuracy(printed)


def test_digits_with_one_seed_gives_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        folder = tmp_path / name
        folder.mkdir()
        printed = run_digits(folder, "--epochs", 3, "--seed", seed)
        runs.append((printed, (folder / "out" / "weights.safetensors").read_bytes()))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_digits_learns_the_same_in_checkpointed_micro_batches(tmp_path: Path) -> None:
    results = []
    for flags in ([], ["--accumulate", 4, "--checkpoint"]):
        printed = run_digits(tmp_path, "--epochs", 2, *flags)
        results.append([float(number) for number in re.findall(r"loss ([\d.]+)", printed)])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_digits_takes_its_flags(tmp_path: Path) -> None:
    flags = ["--epochs", 2, "--batch-size", 500, "--hidden", 32, "--lr", 0.01, "--weight-decay", 0]
    flags += ["--label-smoothing", 0, "--device", "reference"]
    printed = run_digits(tmp_path, *flags)
    assert "MLP 64-32-10, 2,410 parameters, on reference" in printed
    assert "epoch   2: loss" in printed


def test_digits_help_explains_every_flag(tmp_path: Path) -> None:
    done = run(DIGITS, "--help", folder=tmp_path)
    assert done.returncode == 0
    names = re.findall(r'flag\(\s*"(--[a-z-]+)"', DIGITS.read_text())
    assert len(names) == 12
    text = " ".join(done.stdout.split())
    for name in names:
        assert re.search(rf" {name} \S.*? [a-z].*?\(default: ", text), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "--epochs: must be a whole number of at least 1; got '0'"),
        (["--batch-size", "2.5"], "--batch-size: must be a whole number of at least 1; got '2.5'"),
        (["--hidden", "64", "-1"], "--hidden: must be a whole number of at least 1; got '-1'"),
        (["--lr", "nan"], "--lr: must be a number above 0; got 'nan'"),
        (["--weight-decay", "-1"], "--weight-decay: must be a number of at least 0; got '-1'"),
        (["--label-smoothing", "2"], "--label-smoothing: must be a number from 0 to 1; got '2'"),
        (["--seed", "x"], "--seed: must be a whole number from 0 to 4294967295; got 'x'"),
        (["--threads", "99999"], "--threads: "),
        (["--device", "abacus"], "--device: invalid choice: 'abacus'"),
        (["--output", "taken"], "--output: cannot make taken: "),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_digits_refuses_bad_flags(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["digits.py", *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DIGITS))["parse_flags"]()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_digits_refuses_bad_flags_without_a_traceback(tmp_path: Path) -> None:
    done = run(DIGITS, "--lr", "fast", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: digits.py")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_digits_stops_when_the_loss_is_no_number(tmp_path: Path) -> None:
    done = run(DIGITS, "--lr", "1e30", "--output", "out", folder=tmp_path)
    assert done.returncode == 1
    assert "the loss is nan in epoch 1; try a smaller --lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_digits_names_a_missing_extra_and_how_to_get_it(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.modules['tqdm'] = None; runpy.run_path(sys.argv[1])"
    done = run("-c", code, DIGITS, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("digits.py: tqdm is missing; ")
    assert "pip install '.[examples]'" in done.stderr


# ---- the other examples ----------------------------------------------------------------------

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path != DIGITS)


def run_short(name: str, folder: Path, *flags: object) -> str:
    """Run the short form of an example, which writes to "out"; return what it printed."""
    path = ROOT / "examples" / name
    done = run(path, "--short", "--threads", 1, "--output", "out", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def number_after(text: str, printed: str) -> float:
    """Return the last number that is printed after a text."""
    found = re.findall(re.escape(text) + r"\s*(-?[\d.]+\d)", printed)
    assert found, printed
    return float(found[-1])


def assert_wrote(folder: Path, printed: str, *names: str) -> None:
    """Check that an example wrote these files and nothing else, and says so."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    line = printed.splitlines()[-1]
    for name in names:
        assert name in line
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG") or not name.endswith(".png")
        assert content


def test_digits_cnn_learns_and_writes_its_files(tmp_path: Path) -> None:
    printed = run_short("digits_cnn.py", tmp_path)
    right, total = reported_accuracy(printed)
    assert total == 360
    assert right / total > 0.7
    assert_wrote(tmp_path / "out", printed, "weights.safetensors", "curve.png")


def test_diabetes_stops_early_and_is_as_good_as_linear_regression(tmp_path: Path) -> None:
    printed = run_short("diabetes.py", tmp_path)
    assert int(number_after("split 0: ", printed.replace(" epochs", ".0 epochs"))) < 40
    score = number_after("network: ", printed)
    assert score > number_after("linear regression: ", printed) - 0.05
    names = ["weights.safetensors", "history.csv", "curve.png"]
    assert_wrote(tmp_path / "out", printed, *names)


def test_text_gru_learns_more_than_which_kind_is_commoner(tmp_path: Path) -> None:
    printed = run_short("text_gru.py", tmp_path)
    always = number_after("always the commoner kind: ", printed)
    assert number_after("words in order: ", printed) > always + 8
    names = ["weights.safetensors", "curve.png", "words.txt"]
    assert_wrote(tmp_path / "out", printed, *names)


GPT_FILES = ["weights.safetensors", "state.safetensors", "curve.png", "samples.txt"]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the GPT printed, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("gpt")
    return run_short("char_gpt.py", folder), folder / "out"


def test_char_gpt_learns_and_writes_text(gpt: tuple[str, Path]) -> None:
    printed, folder = gpt
    assert number_after("held-out loss after 60 updates: ", printed) < 3.1  # ln 95 at first: 4.6
    assert_wrote(folder, printed, *GPT_FILES)
    samples = (folder / "samples.txt").read_text()
    assert samples.split("\n\n")[0] in printed
    assert len(samples) == 2 * 80 + 2


def test_char_gpt_goes_on_in_a_new_process_to_the_same_bits(
    gpt: tuple[str, Path], tmp_path: Path
) -> None:
    first = run_short("char_gpt.py", tmp_path, "--stop-after", 40)
    assert "update    40:" in first
    assert "update    60:" not in first
    second = run_short("char_gpt.py", tmp_path, "--resume")
    assert "going on after 40 updates" in second
    resumed, whole = (pg.io.read_weights(f / GPT_FILES[0]) for f in (tmp_path / "out", gpt[1]))
    assert resumed.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)
    assert (tmp_path / "out" / "samples.txt").read_text() == (gpt[1] / "samples.txt").read_text()


def test_char_gpt_learns_the_same_in_checkpointed_micro_batches(
    gpt: tuple[str, Path], tmp_path: Path
) -> None:
    flags = ["--accumulate", 4, "--checkpoint", "--stop-after", 20]
    line = run_short("char_gpt.py", tmp_path, *flags)
    for said in ("update    20: loss ", "held out "):
        whole = gpt[0][: gpt[0].index("update    40")]
        assert number_after(said, line) == pytest.approx(number_after(said, whole), rel=1e-3)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_explains_every_flag(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    names = re.findall(r'flag\(\s*"(--[a-z-]+)"', path.read_text())
    assert "--short" in names
    text = " ".join(capsys.readouterr().out.split())
    for name in names:
        assert re.search(rf" {name} \S.*? [a-z].*?\(default: ", text), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("flags", [["--threads", "99999"], ["--device", "abacus"]])
def test_example_ends_with_one_line_about_a_bad_value(
    path: Path, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    threads = pg.get_num_threads()
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        pg.set_num_threads(threads)
    assert str(ended.value.code).startswith(f"{path.name}: ")
    assert flags[1] in str(ended.value.code)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("digits_cnn.py", ["--epochs", "0"], "--epochs: must be at least 1; got 0"),
        ("text_gru.py", ["--words", "many"], "--words: invalid count value: 'many'"),
        ("diabetes.py", ["--split", "3"], "unrecognized arguments: --split 3"),
        ("char_gpt.py", ["--accumulate", "5"], "--accumulate: must divide the batch size, 32"),
        ("char_gpt.py", ["--characters", "9"], "--characters: must be at least 1280, 20 contexts"),
        ("char_gpt.py", ["--temperature", "0"], "--temperature: must be above 0"),
    ],
)
def test_example_refuses_bad_flags(
    name: str,
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name))["parse_flags"]()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_char_gpt_says_when_there_is_nothing_to_resume(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "char_gpt.py", "--short", "--resume", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("char_gpt.py: ")
    assert "state.safetensors" in done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_names_a_missing_extra_and_how_to_get_it(path: Path, tmp_path: Path) -> None:
    code = "import runpy, sys; sys.modules['matplotlib'] = None; runpy.run_path(sys.argv[1])"
    done = run("-c", code, path, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path.name}: matplotlib")
    assert "pip install '.[examples]'" in done.stderr


# ---- README.md -------------------------------------------------------------------------------


def test_readme_example_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    done = run("-W", "error", "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.01  # the last loss


def test_readme_names_only_what_there_is() -> None:
    text = (ROOT / "README.md").read_text()
    for name, rest in re.findall(r"\b(ag|nn|optim|pg)\.([A-Za-z_]+)", text):
        assert hasattr({"ag": pg.ag, "nn": pg.nn, "optim": pg.optim, "pg": pg}[name], rest), rest


def test_readme_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link
