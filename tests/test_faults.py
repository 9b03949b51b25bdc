"""
Faults, for real: processes killed at any moment, disks that are full, bytes that are not what was written.

`make test` injects a few of each kind, `make test-long` hundreds; both print what was tried and what survived.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

import allocate
import bench
import config
import measure
import prepare_data
import sample
import train
from model import load_checkpoint
from prepare_data import Corpus
from test_train import ROOT, SMALL, data                   # noqa: F401  (a fixture)

LONG = bool(os.environ.get("NANOLOOP_LONG"))
KILLS, PREPARE_KILLS, MUTATIONS, STEPS = (160, 60, 1200, 2400) if LONG else (10, 6, 150, 300)
CHANGED = 98                                               # exit code: read without complaint, but it is not what was written


def fork(log, function, *args, disk=None):
    """function(*args) in a process of its own, as a script's main() would run, all it prints appended to `log` -> pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        if disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
        config.run(lambda: function(*args))
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid, log, seconds=90):
    """-> its exit code, negative for a signal. A process that hangs or shows a traceback fails the test."""
    deadline = time.time() + seconds
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.time() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"hangs: {Path(log).read_text()[-2000:]}")
        time.sleep(0.002)
    text = Path(log).read_text() if os.path.exists(log) else ""
    assert "Traceback" not in text, text[-3000:]
    return os.waitstatus_to_exitcode(done[1])


def say(capsys, line):
    with capsys.disabled():
        print(f"\n{line}", flush=True)


def training(corpus, out, *args):
    return [f"--data={corpus}", f"--out={out}", *SMALL, "--eval_tokens=64", *args]


def state(out):
    """Everything of a checkpoint that training goes on from; it must be whole."""
    config.check_bytes(out / "ckpt.pt")
    ckpt = torch.load(out / "ckpt.pt", weights_only=True)
    return ckpt["step"], ckpt["model"], [optimizer["state"] for optimizer in ckpt["optimizers"]]


def same(a, b):
    """Bitwise, through dicts, sequences and tensors."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---------------------------------------------------------------------------------------------------------
# long runs

def test_a_run_killed_at_any_moment_loses_nothing(data, tmp_path, capsys):
    """Oracle: weights and optimizer of the uninterrupted run, bitwise. SIGKILL, SIGTERM, SIGINT; loading, steps, saving, evaluation."""
    rng, tried, survived, endings = random.Random(0), 0, 0, {}
    started = time.time()
    assert ended(fork(tmp_path / "log", train.main, training(data, tmp_path / "whole")), tmp_path / "log") == 0
    seconds, (steps, *whole) = time.time() - started, state(tmp_path / "whole")
    for run in range(10_000):
        if tried >= KILLS:
            break
        out, log, every, code, before = tmp_path / f"run{run}", tmp_path / f"log{run}", rng.choice((1, 1, 4, 10)), None, 0
        while code != 0:
            there = (out / "ckpt.pt").exists()
            pid = fork(log, train.main, training(data, out, f"--eval_interval={every}", f"--init_from={'resume' if there else 'scratch'}"))
            how = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
            time.sleep(rng.uniform(0.01, 1.3 * seconds))
            running = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            if running:
                os.kill(pid, how)
            code = ended(pid, log)
            endings[code] = endings.get(code, 0) + 1
            assert code in (0, -how, 128 + how), log.read_text()[-2000:]
            tried += running
            if (out / "ckpt.pt").exists():                 # the newest whole one is there, and never older than before
                step = state(out)[0]
                assert before <= step <= steps
                before = step
                if code == 128 + how and how == signal.SIGTERM:
                    assert f"goes on from step {step}" in log.read_text()
            else:
                assert before == 0
            survived += running
        step, *rest = state(out)
        assert step == steps and same(rest, whole)
        assert not list(out.glob("*.part"))
    say(capsys, f"training killed: tried {tried}, survived {survived}, lost {tried - survived}; exit codes {endings}")


def test_the_second_ctrl_c_insists_without_a_traceback(data, tmp_path):
    """Sent faster than a step takes; the last whole checkpoint, or none, is there."""
    log = tmp_path / "log"
    pid = fork(log, train.main, training(data, tmp_path / "out", "--batch_size=512", "--eval_interval=1"))
    while not log.exists() or "data " not in log.read_text():
        time.sleep(0.01)
    for _ in range(2):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.02)
    assert ended(pid, log) in (130, 0)
    assert not (tmp_path / "out/ckpt.pt").exists() or state(tmp_path / "out")


def test_two_runs_do_not_train_into_one_folder(data, tmp_path):
    log = tmp_path / "log"
    pid = fork(log, train.main, training(data, tmp_path / "out", "--max_steps=100000", "--eval_interval=100000"))
    while not log.exists() or "data " not in log.read_text():
        time.sleep(0.01)
    second = fork(tmp_path / "second", train.main, training(data, tmp_path / "out"))
    assert ended(second, tmp_path / "second") == 2
    assert "another process is training into" in (tmp_path / "second").read_text()
    os.kill(pid, signal.SIGKILL)
    assert ended(pid, log) == -9
    assert ended(fork(log, train.main, training(data, tmp_path / "out")), log) == 0          # a lock goes with its process


@pytest.mark.parametrize("kind", ["quota", "tmpfs"])
def test_a_full_disk_keeps_the_checkpoint_before_and_says_so(kind, data, tmp_path):
    """Oracle: the bytes of that checkpoint; and with room again the run ends as if nothing had been."""
    out, log = tmp_path / "out", tmp_path / "log"
    assert ended(fork(log, train.main, training(data, tmp_path / "whole")), log) == 0
    assert ended(fork(log, train.main, training(data, tmp_path / "first", "--max_steps=10", "--decay_fraction=0")), log) == 0
    size = (tmp_path / "whole/ckpt.pt").stat().st_size
    out.mkdir()
    if kind == "tmpfs" and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", str(out)], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        straight = training(data, out, "--decay_fraction=0")
        assert ended(fork(log, train.main, training(data, tmp_path / "straight", "--decay_fraction=0")), log) == 0
        shutil.copy(tmp_path / "first/ckpt.pt", out)
        kept, text = (out / "ckpt.pt").read_bytes(), tmp_path / "full"
        code = ended(fork(text, train.main, [*straight, "--init_from=resume"], disk=size // 2 if kind == "quota" else None), text)
        assert code == 1 and "could not be written" in text.read_text()
        assert (out / "ckpt.pt").read_bytes() == kept and not list(out.glob("*.part"))
    finally:
        if kind == "tmpfs":
            shutil.copytree(out, tmp_path / "rescued")
            subprocess.run(["umount", str(out)], check=True)
            out = tmp_path / "rescued"
    assert ended(fork(log, train.main, training(data, out, "--decay_fraction=0", "--init_from=resume")), log) == 0
    assert same(state(out), state(tmp_path / "straight"))


def test_a_full_disk_stops_measuring_with_one_line_and_keeps_the_older_files(data, tmp_path):
    log = tmp_path / "log"
    assert ended(fork(log, train.main, training(data, tmp_path)), log) == 0
    (tmp_path / "measure.json").write_text("older")

    def main():
        sys.argv = ["measure.py", f"--ckpt={tmp_path}/ckpt.pt", "--tokens=64", "--max_depth=4", "--cache_tokens=0"]
        measure.main()

    (tmp_path / "said").write_text("")
    assert ended(fork(tmp_path / "said", main, disk=12_000), tmp_path / "said") == 2        # the file it prints to counts as well
    assert "cannot write" in (tmp_path / "said").read_text() and (tmp_path / "measure.json").read_text() == "older" and not list(tmp_path.glob("*.part"))


def test_the_memory_of_a_long_run_is_flat(data, tmp_path, capsys):
    """Resident memory from a quarter of the steps to the last: it grows by less than 1 %, and half a megabyte."""
    log, sizes = tmp_path / "log", {}
    pid = fork(log, train.main, training(data, tmp_path / "out", f"--max_steps={STEPS}", "--log_interval=20", f"--eval_interval={STEPS // 10}"))
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        seen = [int(line.split()[1].split("/")[0]) for line in log.read_text().splitlines() if line.startswith("step ")] if log.exists() else []
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            break
        if seen and pages:                                 # a process that is leaving has none
            sizes[seen[-1]] = pages * resource.getpagesize() / 2**20
        time.sleep(0.05)
    assert ended(pid, log) == 0
    late = {step: size for step, size in sizes.items() if step >= STEPS // 4}
    first, last = late[min(late)], late[max(late)]
    say(capsys, f"memory of {STEPS} steps: {first:.1f} MiB at step {min(late)}, {last:.1f} MiB at step {max(late)}")
    assert len(late) > 3 and 1 < last <= 1.01 * first + 0.5


def test_a_rank_that_dies_ends_the_other_with_a_message(data, tmp_path):
    """torchrun with two ranks, one of them killed as it trains: no hang, a clear line, the last checkpoint is whole."""
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
                                *training(data, tmp_path / "out", "--max_steps=100000", "--eval_interval=5", "--log_interval=5")],
                               cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.time() + 90
        while not (tmp_path / "out/ckpt.pt").exists():
            assert run.poll() is None and time.time() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        ranks = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                env = dict(item.split("=", 1) for item in (process / "environ").read_text().split("\0") if "=" in item)
                if f"--out={tmp_path / 'out'}" in (process / "cmdline").read_text().split("\0") and "LOCAL_RANK" in env:
                    ranks[int(env["RANK"])] = int(process.name)
            except OSError:
                continue
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(60) != 0
    finally:
        run.kill()
    text = (tmp_path / "log").read_text()
    assert "another process of this run is gone" in text and "Traceback (most recent call last):\n  File \"" + str(ROOT) not in text, text[-3000:]
    assert state(tmp_path / "out")[0] % 5 == 0


def test_preparing_data_killed_at_any_moment_leaves_nothing_or_all(data, tmp_path, capsys):
    """Oracle: the bytes of the uninterrupted run."""
    rng = random.Random(1)

    def prepare(out):
        sys.argv = ["prepare_data.py", f"{data.parent}/*.txt", "--tokenizer=byte", "--val_fraction=0.25", f"--out={out}"]
        prepare_data.main()

    started = time.time()
    assert ended(fork(tmp_path / "log", prepare, tmp_path / "first"), tmp_path / "log") == 0
    seconds, tried = time.time() - started, 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    for run in range(PREPARE_KILLS):
        out, log = tmp_path / f"data{run}", tmp_path / f"log{run}"
        pid = fork(log, prepare, out)
        time.sleep(rng.uniform(0.01, 1.1 * seconds))
        running = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        if running:
            os.kill(pid, signal.SIGKILL)
        assert ended(pid, log) in ((-9, 0) if running else (0,))         # it may be leaving as the signal arrives
        tried += running
        if out.exists():
            assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
        assert ended(fork(log, prepare, out), log) == 0
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    say(capsys, f"preparation killed: tried {tried}, survived {tried}, lost 0")


# ---------------------------------------------------------------------------------------------------------
# what comes from strangers

def mutate(content, rng):
    """A few bytes changed, cut off, put in, left out, zeroed or repeated."""
    content, at = bytearray(content), rng.randrange(max(1, len(content)))
    kind = rng.choice(("flip", "flip", "flips", "cut", "empty", "insert", "delete", "zero", "repeat", "digits"))
    length = min(rng.choice((1, 2, 8, 100)), max(1, len(content) - at))
    if kind == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for _ in range(min(20, len(content))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == "cut":
        del content[at:]
    elif kind == "empty":
        content.clear()
    elif kind == "insert":
        content[at:at] = rng.randbytes(length)
    elif kind == "delete":
        del content[at:at + length]
    elif kind == "zero":
        content[at:at + length] = bytes(length)
    elif kind == "repeat":
        content[at:at] = content[at:at + length]
    else:                                                  # numbers of a text file become other numbers
        digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
        for i in rng.sample(digits, min(3, len(digits))):
            content[i] = ord(rng.choice("0123456789-.e"))
    return bytes(content)


SETTINGS = {"train": train, "measure": measure, "allocate": allocate, "sample": sample, "bench": bench, "prepare_data": prepare_data}
NASTY = ("", "nan", "inf", "-inf", "-1", "0", "1e308", "2**63", "2**64**64", "9" * 400, "True", "None", "[]", "{}", "'", "\\", "\0", "../..", "/", "é", "🙂",
         "1 + 1", "__import__('os')", "lambda: 0", "()", "0x10", "1e-400", "a=b", "=", "--", "%s", "$HOME", "\n")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):                       # noqa: F811
    """A small run's folder, with its data beside it."""
    folder = tmp_path_factory.mktemp("strangers")
    shutil.copytree(data, folder / "data")
    assert ended(fork(folder / "log", train.main, training(folder / "data", folder / "out")), folder / "log") == 0
    return folder


def read_checkpoint(folder, original):
    """As measure.py, allocate.py and sample.py read it; then as a resumed run does."""
    model, ckpt, _ = measure.load(folder / "out/ckpt.pt", folder / "data")
    if not same(model.state_dict(), original[0]) or ckpt["config"] != original[1]:
        sys.exit(CHANGED)
    train.main(training(folder / "data", folder / "out", "--init_from=resume"))


def read_shard(folder, original):
    """As --verify does."""
    try:
        corpus = Corpus(folder / "data")
        corpus.verify()
    except (ValueError, OSError) as error:
        config.fail(str(error))
    if [corpus.read("train", 0, 0, 10**6).tolist(), corpus.read("val", 0, 0, 10**6).tolist()] != original:
        sys.exit(CHANGED)


def read_meta(folder, original):
    """As train.py does, up to its first batch."""
    try:
        corpus = Corpus(folder / "data")
        corpus.windows("val", 64, 16)
        corpus.batch("train", 0, 0, 4, 16)
    except (ValueError, OSError) as error:
        config.fail(str(error))


def test_mutated_files_are_refused_with_a_line_or_change_nothing(trained, tmp_path, capsys):
    """
    Oracle: the file as it was written. Checkpoints, shards, meta.json, configuration files, allocate.json and prompts, a
    few bytes wrong: exit code 2 and one line, or 0 with the same content; never a traceback, a hang, or other numbers.
    """
    rng, outcome = random.Random(2), {}
    model, ckpt = load_checkpoint(trained / "out/ckpt.pt")
    corpus = Corpus(trained / "data")
    tokens = [corpus.read("train", 0, 0, 10**6).tolist(), corpus.read("val", 0, 0, 10**6).tolist()]
    (trained / "config.py").write_text((ROOT / "config/tiny.py").read_text())
    (trained / "prompt.txt").write_text("import os\nKäse 🙂\n" * 5)
    (trained / "out/allocate.json").write_text(json.dumps(
        {"decode": {"state": {"threshold": 0.25}}, "meta": {"step": 20, "config": ckpt["config"], "trained_on": ckpt["data"], "max_loops": 3}}))
    shard, = (path for path in (trained / "data").glob("*_train_*.bin"))
    readers = {
        "out/ckpt.pt": lambda folder: read_checkpoint(folder, (model.state_dict(), ckpt["config"])),
        f"data/{shard.name}": lambda folder: read_shard(folder, tokens),
        "data/meta.json": lambda folder: read_meta(folder, None),
        "config.py": lambda folder: config.parse(train.Settings, "", [f"{folder}/config.py"]),
        "out/allocate.json": lambda folder: sample.threshold(sample.Settings(ckpt=f"{folder}/out/ckpt.pt"), ckpt, 3),
        "prompt.txt": lambda folder: sample.read_prompts([f"LINES:{folder}/prompt.txt"], "byte"),
    }
    weights = (4, 2, 4, 4, 1, 1)
    for i in range(MUTATIONS):
        name, = rng.choices(list(readers), weights)
        folder = tmp_path / str(i)
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("log*", "*.lock"))
        (folder / name).write_bytes(mutate((trained / name).read_bytes(), rng))
        log = folder / "said"
        code = ended(fork(log, readers[name], folder), log)
        said = log.read_text(errors="replace")
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code in (0, 2), f"{name}, mutation {i}: exit code {code}: {said[-1000:]}"
        assert len(errors) == (code == 2), f"{name}, mutation {i}: {said[-1000:]}"
        outcome.setdefault(name.split("/")[-1], [0, 0])[code == 2] += 1
        shutil.rmtree(folder)
    say(capsys, f"mutated files: tried {MUTATIONS}, lost 0; accepted unchanged or valid, refused: {outcome}")


def test_nasty_command_lines_are_refused_with_a_line_or_mean_something(tmp_path, capsys):
    """Every setting of every script with values that people and fuzzers type."""
    rng, tried, refused = random.Random(3), 0, 0
    log = tmp_path / "log"

    def parse_all(cases):
        for script, argv in cases:
            try:
                config.parse(SETTINGS[script].Settings, "", argv)
            except SystemExit as exit:
                if exit.code not in (0, 2):
                    raise
                print("refused")

    keys = {script: [f for f in module.Settings.__dataclass_fields__] for script, module in SETTINGS.items()}
    cases = [(script, [f"--{key}={value}"]) for script in keys for key in keys[script] for value in NASTY]
    for _ in range(MUTATIONS):
        script = rng.choice(list(SETTINGS))
        cases.append((script, [mutate(f"--{rng.choice(keys[script])}={rng.choice(NASTY)}".encode(), rng).decode(errors="replace") for _ in range(rng.randrange(1, 4))]))
    assert ended(fork(log, parse_all, cases), log) == 0
    lines = log.read_text(errors="replace").splitlines()
    tried, refused = len(cases), lines.count("refused")
    assert refused > tried / 4 and sum(line.startswith("error: ") for line in lines) <= refused
    say(capsys, f"nasty command lines: tried {tried}, refused {refused}, tracebacks 0")


CONFIGS = {"nested powers": "max_steps = ((9**64)**64)**64", "many terms": "max_steps = " + "+".join("1" * 20_000), "many signs": "max_steps = " + "-" * 20_000 + "1",
           "a long number": "max_steps = " + "9" * 6000, "deep brackets": "max_steps = " + "(" * 5000 + "1" + ")" * 5000, "a product": "max_steps = " + "*".join(["9**64"] * 99)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_arithmetic_that_explodes_is_refused_in_a_file_and_on_the_command_line(kind, tmp_path):
    """Oracle: one line, exit code 2, at once; the same expression as a value too."""
    (tmp_path / "c.py").write_text(CONFIGS[kind])
    for i, argv in enumerate(([f"{tmp_path}/c.py"], ["--max_steps" + CONFIGS[kind].removeprefix("max_steps ").replace(" ", "")])):
        log = tmp_path / f"log{i}"
        assert ended(fork(log, config.parse, train.Settings, "", argv), log, seconds=20) == 2
        assert log.read_text().startswith("error: ") and log.read_text().count("\n") == 1


OUTPUTS = {"closed": ">&-", "both closed": ">&- 2>&-", "full": "> /dev/full", "ascii": "", "gone": "| true"}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_that_cannot_take_a_line_brings_no_traceback(kind, trained, tmp_path):
    """A checkpoint in a folder whose name ASCII does not have, and text of a model that says anything."""
    (tmp_path / "é🙂").mkdir()
    shutil.copy(trained / "out/ckpt.pt", tmp_path / "é🙂/ckpt.pt")
    command = f"{sys.executable} sample.py '--ckpt={tmp_path}/é🙂/ckpt.pt' --prompt=Käse --max_new_tokens=30 {OUTPUTS[kind]}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=90, stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii" if kind == "ascii" else "utf-8"})
    said = done.stderr.decode()
    assert "Traceback" not in said and "Exception ignored" not in said, said
    assert done.returncode == {"full": 1}.get(kind, 0), (done.returncode, said)
    assert ("No space left" in said and said.count("\n") == 1) if kind == "full" else not said


@pytest.mark.parametrize("what", ["ckpt", "prompt", "config", "resume", "html"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_refused_and_never_waited_for(kind, what, trained, tmp_path):
    path = tmp_path / ("thing.py" if what == "config" else "ckpt.pt" if what == "resume" else "thing.html")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    ckpt = trained / "out/ckpt.pt"
    argv = {"ckpt": [f"--ckpt={path}"], "prompt": [f"--ckpt={ckpt}", f"--prompt=FILE:{path}"], "html": [f"--ckpt={ckpt}", f"--html={path}"],
            "config": [str(path)], "resume": training(trained / "data", tmp_path, "--init_from=resume")}[what]

    def main():
        sys.argv = ["sample.py", *argv]
        train.main(argv) if what == "resume" else sample.main()

    log = tmp_path / "log"
    assert ended(fork(log, main), log, seconds=30) == 2
    assert str(path) in log.read_text() and log.read_text().count("error: ") == 1


@pytest.mark.parametrize("name", ["meta.json", "corpus0_val_000000.bin"])
def test_data_that_is_a_pipe_is_refused_and_never_waited_for(name, trained, tmp_path):
    shutil.copytree(trained / "data", tmp_path / "data")
    (tmp_path / "data" / name).unlink()
    os.mkfifo(tmp_path / "data" / name)
    log = tmp_path / "log"
    assert ended(fork(log, train.main, training(tmp_path / "data", tmp_path / "out")), log, seconds=20) == 2
    assert f"{name} is not a file" in log.read_text() and log.read_text().count("error: ") == 1


def test_too_little_memory_is_said_in_one_line(trained, tmp_path):
    """An address space that holds the model, not what it is asked to compute."""
    def main():
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
        train.main(training(trained / "data", tmp_path / "out", "--batch_size=20000"))

    log = tmp_path / "log"
    assert ended(fork(log, main), log) == 1
    assert "not enough memory" in log.read_text()
