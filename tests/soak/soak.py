"""Kill a training run again and again, and show that it ends as if nothing had happened.

examples/char_gpt.py trains twice for equally many updates, both at once. One run is left alone. The
other saves its state every so many seconds, is killed (SIGKILL) at random moments, and goes on with
--resume. What the two runs wrote must be equal to the last bit: weights, training state, samples.

    python tests/soak/soak.py                   # about 30 minutes of training; 20 kills
    python tests/soak/soak.py --minutes 5
    python tests/soak/soak.py --short           # seconds, 2 kills: as the tests do
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors import safe_open

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_gpt.py"
FILES = "weights.safetensors", "state.safetensors", "samples.txt"
UPDATE = re.compile(r"update +(\d+): .*; (\d+) ms/update")


def start(
    flags: list[str], output: Path, *more: str, lines: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start the example; its lines come through a pipe, or go elsewhere."""
    command = [sys.executable, EXAMPLE, *flags, "--output", output, *more]
    return subprocess.Popen(command, stdout=lines, text=True)


def finish(child: subprocess.Popen[str]) -> str:
    """Wait for the end of a run that nobody kills."""
    printed, _ = child.communicate()
    if child.returncode:
        sys.exit(f"soak.py: the run failed with status {child.returncode}:\n{printed}")
    return printed or ""


def milliseconds_per_update(flags: list[str], folder: Path) -> int:
    """Measure how long an update takes."""
    printed = finish(start(flags, folder, "--steps", "40", "--every", "40", "--length", "1"))
    return max(1, int(UPDATE.findall(printed)[-1][1]))


def wait_for_update(child: subprocess.Popen[str], wanted: int) -> int | None:
    """Return the first update that the run reports from `wanted` on; None if it ends before."""
    assert child.stdout is not None
    for line in child.stdout:
        found = UPDATE.match(line)
        if found and int(found[1]) >= wanted:
            return int(found[1])
    return None


def killed_run(flags: list[str], folder: Path, steps: int, kills: int, pause: float) -> int:
    """Train, killed after each of `kills` equal parts of the way; return how often it was.

    Each time a random while, of up to `pause` seconds, passes from a report to the kill.
    """
    done = 0
    for part in range(1, kills + 1):
        resumed = (folder / "state.safetensors").exists()
        child = start(flags, folder, *(["--resume"] if resumed else []))
        update = wait_for_update(child, part * steps // (kills + 1))
        if update is None:
            if child.wait():
                sys.exit(f"soak.py: the run failed with status {child.returncode}")
            break  # it reached its end during the last pause
        seconds = random.uniform(0, pause)
        time.sleep(seconds)
        child.kill()
        child.communicate()
        if child.returncode < 0:
            done += 1
            print(f"killed {seconds:.2f} s after update {update}", flush=True)
    finish(start(flags, folder, "--resume"))
    return done


def digest(path: Path) -> str:
    """Return a digest of what a file says. Two safetensors files may say it in another order."""
    if path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    total = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        total.update(repr(sorted((file.metadata() or {}).items())).encode())
        for name in sorted(file.keys()):
            array = file.get_tensor(name)
            total.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    return {name: digest(folder / name) for name in FILES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill a training run again and again; it must end as if nothing had happened.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = parser.add_argument
    flag("--minutes", type=float, default=30, metavar="X", help="length of the run, about")
    flag("--kills", type=int, default=20, metavar="N", help="how often it is killed")
    flag("--save-every", type=float, default=30, metavar="S", help="seconds between saves, about")
    flag("--threads", type=int, default=1, metavar="N", help="CPU threads of each run")
    flag("--seed", type=int, default=None, metavar="N", help="of the moments of the kills")
    flag("--short", action="store_true", help="seconds instead of minutes; a tiny model, 2 kills")
    args = parser.parse_args()
    seed = random.randrange(1000) if args.seed is None else args.seed
    random.seed(seed)

    flags = ["--threads", str(args.threads), "--dropout", "0.1"]
    with tempfile.TemporaryDirectory(prefix="pyggml-soak-") as name:
        folder = Path(name)
        if args.short:
            flags.append("--short")  # sets steps and pauses itself
            steps, kills, pause = 60, 2, 0.02
        else:
            each = milliseconds_per_update(flags, folder / "speed")
            steps = max(100, round(60_000 * args.minutes / each))
            kills, pause = args.kills, 1.2 * args.save_every
            every = max(1, min(round(1000 * args.save_every / each), steps // (2 * kills)))
            flags += ["--steps", str(steps), "--every", str(every)]
            print(f"{each} ms an update: {steps} updates, a save after every {every}")
        print(f"moments of the kills: --seed {seed}", flush=True)

        left_alone = start(flags, folder / "alone", lines=subprocess.DEVNULL)
        try:
            done = killed_run(flags, folder / "killed", steps, kills, pause)
            finish(left_alone)
        finally:
            left_alone.kill()
        alone, killed = digests(folder / "alone"), digests(folder / "killed")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    for name in FILES:
        verdict = "equal" if alone[name] == killed[name] else "DIFFERENT"
        print(f"{name:<20} {alone[name][:16]} {killed[name][:16]} {verdict}")
    print(f"{done} kills; largest resident memory {peak:.0f} MiB")
    if alone != killed:
        sys.exit("soak.py: the killed run ended elsewhere")


if __name__ == "__main__":
    main()
