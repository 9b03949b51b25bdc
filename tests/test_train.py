"""train.py end to end on a small corpus, in this process and under torchrun."""

import dataclasses
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import train
from model import LoopConfig, LoopLM, load_checkpoint
from prepare_data import Corpus

ROOT = Path(__file__).parent.parent
SMALL = ["--block_size=16", "--n_embd=32", "--n_head=2", "--n_kv_head=1", "--n_hidden=48", "--n_prelude=1", "--n_core=1",
         "--n_coda=1", "--mean_loops=3", "--max_loops=8", "--backprop_loops=2", "--batch_size=4", "--grad_accum=2",
         "--max_steps=20", "--warmup_steps=3", "--eval_interval=10", "--eval_tokens=320", "--device=cpu", "--dtype=float32",
         "--compile=False", "--optimizer=adamw"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two dozen documents of words, prepared by the real command."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(24):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(["the", "loop", "is", "deep", "7", "token,"]) for _ in range(120)))
    subprocess.run([sys.executable, "prepare_data.py", str(folder), "--tokenizer=byte", "--val_fraction=0.25",
                    f"--out={folder}/shards"], cwd=ROOT, check=True, capture_output=True)
    return folder / "shards"


def run(data, out, *args):
    """train.py with the small settings -> its model's weights."""
    model = train.main([f"--data={data}", f"--out={out}", *SMALL, *args])
    return {name: p.clone() for name, p in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a, b, atol=1e-5):
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=atol) for name in a)


@pytest.mark.parametrize("mean, sigma, most", [(8, 0.5, 32), (4, 0.5, 16), (8, 1.0, 64), (2, 0.3, 4), (8, 0.0, 32), (30, 0.5, 32)])
def test_the_mean_of_r_is_mean_loops(mean, sigma, most):
    """Oracle: the empirical mean of 40,000 steps' draws, and the range."""
    cumulative = train.loop_distribution(mean, sigma, most)
    draws = [train.draw_loops(cumulative, 5, step) for step in range(40000)]
    assert np.mean(draws) == pytest.approx(mean, rel=0.01)
    assert 1 <= min(draws) and max(draws) <= most


def test_r_follows_the_clipped_rounded_log_normal():
    """Oracle: numpy's log-normal with the same mu, rounded and clipped, value by value."""
    cumulative = np.array(train.loop_distribution(8, 0.5, 32))
    probabilities = np.diff(cumulative, prepend=0)
    sample = np.random.default_rng(0).lognormal(0, 0.5, 400_000)
    mu = np.log(8 / np.clip(np.round(sample * np.exp(np.log(8) - 0.125)), 1, 32).mean()) + np.log(8) - 0.125
    expected = np.bincount(np.clip(np.round(sample * np.exp(mu)), 1, 32).astype(int), minlength=33)[1:] / len(sample)
    assert np.abs(probabilities - expected).max() < 4e-3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_after_ten_steps_equals_twenty_straight_ones(optimizer, data, tmp_path):
    """Oracle: the uninterrupted run, weights to the last bit; noise, r and batches all take part."""
    ten = ["--schedule=cosine", "--eval_interval=10", f"--optimizer={optimizer}"]
    straight = run(data, tmp_path / "a", *ten[::2])
    with pytest.raises(SystemExit):                        # the run is stopped at step 10, as by SIGTERM
        stop_at(10, lambda: run(data, tmp_path / "b", *ten))
    assert torch.load(tmp_path / "b/ckpt.pt", weights_only=True)["step"] == 10
    assert same(straight, run(data, tmp_path / "b", *ten, "--init_from=resume"))


def stop_at(step, function):
    """Call the function; SIGTERM reaches this process while it works on the given step."""
    original = train.draw_loops

    def draw_loops(cumulative, seed, now):
        if now == step - 1:
            os.kill(os.getpid(), train.signal.SIGTERM)
        return original(cumulative, seed, now)

    train.draw_loops = draw_loops
    try:
        return function()
    finally:
        train.draw_loops = original


def test_evaluation_does_not_change_training(data, tmp_path):
    """Oracle: the same run with another evaluation interval, to the last bit."""
    assert same(run(data, tmp_path / "a", "--eval_interval=3"), run(data, tmp_path / "b", "--eval_interval=20"))


def test_a_batch_equals_its_halves_accumulated(data, tmp_path):
    """Oracle: batch 8 at once against 2 x 4; zeros as the initial state, or the noise would be dealt out differently."""
    zeros = ["--state_init=zeros", "--max_steps=5"]
    a = run(data, tmp_path / "a", *zeros, "--batch_size=8", "--grad_accum=1")
    b = run(data, tmp_path / "b", *zeros, "--batch_size=4", "--grad_accum=2")
    assert close(a, b)
    assert not close(a, run(data, tmp_path / "c", *zeros, "--batch_size=4", "--grad_accum=1"), atol=1e-3)


WORKER = """
import sys, os, torch, train
from prepare_data import Corpus
rank, seen = os.environ["RANK"], []
batch, draw = Corpus.batch, train.draw_loops
def spy_batch(self, split, seed, step, *args):
    x, y = batch(self, split, seed, step, *args)
    if args[1] == 16 and len(args) == 4: seen.append(("x", step, x.copy()))
    return x, y
def spy_draw(cumulative, seed, step):
    r = draw(cumulative, seed, step)
    seen.append(("r", step, r))
    return r
Corpus.batch, train.draw_loops = spy_batch, spy_draw
model = train.main(sys.argv[2:])
torch.save({"weights": model.state_dict(), "r": [v for k, _, v in seen if k == "r"],
            "x": [torch.from_numpy(v) for k, _, v in seen if k == "x"]}, f"{sys.argv[1]}/rank{rank}.pt")
"""


def test_two_ranks_share_r_and_the_batch_and_end_with_equal_weights(data, tmp_path):
    """Oracle: one process that does the work of both (zeros as the initial state, or their noise would differ)."""
    args = [f"--data={data}", *SMALL, "--state_init=zeros", "--max_steps=5"]
    (tmp_path / "worker.py").write_text(WORKER)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "worker.py"),
                    str(tmp_path), f"--out={tmp_path}/two", *args], cwd=ROOT, check=True, capture_output=True, timeout=240,
                   env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    a, b = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same(a["weights"], b["weights"])
    assert a["r"] == b["r"] and len(set(a["r"])) > 1
    assert len(a["x"]) == len(b["x"]) == 5
    assert not any(torch.equal(x, y) for x, y in zip(a["x"], b["x"]))
    assert close(a["weights"], run(data, tmp_path / "one", "--state_init=zeros", "--max_steps=5"))


def test_training_learns_and_the_checkpoint_is_the_model(data, tmp_path, capsys):
    """Oracle: the corpus repeats six words, so 200 steps must halve the loss; the checkpoint predicts what the model does."""
    model = train.main([f"--data={data}", f"--out={tmp_path}", *SMALL, "--max_steps=200", "--eval_interval=200"])
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if "  loss " in line]
    assert len(losses) == 200 and losses[-1] < 0.5 * losses[0]
    loaded, ckpt = load_checkpoint(tmp_path / "ckpt.pt")
    x, y = (torch.from_numpy(a) for a in Corpus(data).windows("val", 320, 16))
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(x)[0], model(x)[0])
        assert ckpt["val_loss_by_depth"]["3"] == pytest.approx(loaded(x, y, 3)[1].item(), abs=1e-4)
    assert ckpt["step"] == 200 and ckpt["data"] == Corpus(data).identity and ckpt["settings"]["seed"] == 1337


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A model of 200 steps, and validation tokens."""
    model = train.main([f"--data={data}", f"--out={tmp_path_factory.mktemp('trained')}", *SMALL, "--max_steps=200", "--eval_interval=200"])
    return model.eval(), torch.from_numpy(Corpus(data).windows("val", 800, 16)[0])


@pytest.mark.parametrize("rule", ["kl", "state", "accel"])
def test_skip_equals_freeze_on_a_trained_model(rule, trained):
    """Oracle: `freeze`, over thresholds from nobody to everybody halting."""
    model, idx = trained
    spread = set()
    for eps in (0.0, 1e-5, 1e-3, 0.03, 0.1, 0.3, 1.0, float("inf")):
        (frozen, depth), (skipped, skipped_depth) = (model.forward_halting(idx, rule, eps, 12, mode) for mode in ("freeze", "skip"))
        # float32 knows a state change of 1e-5 to about 1 %: there, and only there, a token on the threshold may differ by a loop
        assert (depth - skipped_depth).abs().sum() <= (idx.numel() // 100 if eps == 1e-5 else 0), eps
        assert torch.allclose(frozen, skipped, atol=1e-4)
        spread |= set(depth.unique().tolist())
    assert len(spread) > 4                                 # the exits were ragged, or nothing was tested


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    """Oracle: the checkpoint of step 10, after a learning rate that breaks the model."""
    run(data, tmp_path, "--max_steps=10")
    before = (tmp_path / "ckpt.pt").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path, "--init_from=resume", "--learning_rate=1e30", "--grad_clip=0", "--max_steps=40")
    assert stopped.value.code == 1 and "not finite" in capsys.readouterr().out
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_nothing_is_trained_over_an_earlier_checkpoint(data, tmp_path, capsys):
    """Oracle: its bytes."""
    run(data, tmp_path, "--max_steps=2")
    before = (tmp_path / "ckpt.pt").read_bytes()
    for args in ([], ["--init_from=resume", "--seed=3"], ["--init_from=resume", "--n_embd=64"]):
        with pytest.raises(SystemExit) as stopped:
            run(data, tmp_path, "--max_steps=2", *args)
        assert stopped.value.code == 2 and (tmp_path / "ckpt.pt").read_bytes() == before
    assert "trained with n_embd=32, not 64" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_makes_an_orthogonal_step_of_the_blocks_matrices_and_leaves_the_rest_to_adamw(dtype):
    """
    Oracles: AdamW alone for the rest; torch.optim.Muon (bfloat16) to the last bit over three steps; and of the first step the
    singular vectors of the gradient, whose values must become about one (from the smallest five iterations do not get there).
    """
    models, lr = [], 0.01
    for name in ("adamw", "muon", "torch"):
        s = config.parse(train.Settings, "", [*SMALL, f"--optimizer={'adamw' if name == 'adamw' else 'muon'}", "--muon_factor=2"])
        torch.manual_seed(0)
        models.append(model := LoopLM(LoopConfig(**{f.name: getattr(s, f.name) for f in dataclasses.fields(LoopConfig)})))
        optimizers = train.make_optimizers(model.train(), s, "cpu", dtype)
        owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        assert len(owned) == len(set(map(id, owned))) == len(list(model.parameters()))
        if name == "torch":
            matrices = optimizers.pop().param_groups[0]["params"]
            optimizers.append(torch.optim.Muon(matrices, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"))
            optimizers[-1].param_groups[0]["factor"] = 2
        old = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            gradients = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=gradients)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["factor"]
                optimizer.step()
            if step == 0 and name == "muon":
                for p, before in zip(model.parameters(), old):
                    if p.dim() == 2 and p is not model.wte.weight:
                        u, _, v = torch.linalg.svd(p.grad.double(), full_matrices=False)
                        moved = (before * (1 - 2 * lr * s.weight_decay) - p).detach().double()
                        turned = u.T @ (moved / (2 * lr * 0.2 * max(p.shape) ** 0.5)) @ v.T
                        values = turned.diagonal()
                        assert 0.7 < values.median() and values.max() < 1.3 and (turned - values.diag()).abs().max() < 0.1
    for (name, a), b, c in zip(models[0].named_parameters(), models[1].parameters(), models[2].parameters()):
        if b.dim() == 2 and name != "wte.weight":
            assert torch.equal(b, c) if dtype == torch.bfloat16 else (b - c).norm() < 0.05 * (c - a).norm(), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("schedule", ["trapezoid", "cosine"])
def test_the_learning_rate_warms_up_and_decays(schedule):
    """Oracle: its value at the landmarks."""
    s = train.Settings(max_steps=100, warmup_steps=10, learning_rate=1.0, min_lr=0.1, schedule=schedule, decay_fraction=0.5)
    assert train.learning_rate(0, s) == pytest.approx(0.1) and train.learning_rate(9, s) == pytest.approx(1.0)
    assert train.learning_rate(100, s) == pytest.approx(0.1)
    middle = {"trapezoid": 0.55, "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * 65 / 90))}[schedule]
    assert train.learning_rate(75, s) == pytest.approx(middle)


def test_compiled_training_equals_eager_training_and_r_never_recompiles(data, tmp_path, capsys):
    """Oracle: the eager run, and dynamo's own count of compilations; bfloat16 has the same shapes and other dtypes."""
    for dtype, atol in (("float32", 1e-4), ("bfloat16", 2e-2)):
        eager = run(data, tmp_path / f"{dtype}a", "--max_steps=2", f"--dtype={dtype}")
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        compiled = run(data, tmp_path / f"{dtype}b", "--max_steps=2", f"--dtype={dtype}", "--compile=True")
        if "compiled in" not in capsys.readouterr().out:
            pytest.skip("no working compiler")
        assert close(eager, compiled, atol)
        further = [run(data, tmp_path / f"{dtype}{way}", "--max_steps=4", f"--dtype={dtype}", "--init_from=resume", f"--compile={way == 'a'}")
                   for way in "ab"]                        # a resume may change to compiled and back
        assert close(*further, 2 * atol)
    graphs = counters["stats"]["unique_graphs"]
    draws = [train.draw_loops(train.loop_distribution(3, 0.5, 8), 1337, step) for step in range(12)]
    assert len(set(draws[:2])) < len(set(draws)) and max(draws) > 2 > min(draws)
    torch._dynamo.reset()
    counters.clear()
    run(data, tmp_path / "c", "--max_steps=12", "--dtype=bfloat16", "--compile=True", "--eval_interval=12")
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("reason", ["no compiler", "its gradients are not finite"])
def test_without_a_compiler_that_works_training_says_so_and_runs_eagerly(reason, data, tmp_path, capsys, monkeypatch):
    """Oracle: the eager run, to the last bit."""
    def broken(function, **kwargs):
        def fails(*args):
            out = function(*args)                          # leaves partial gradients, as a late failure does
            if reason == "no compiler":
                raise RuntimeError("no compiler\nand a long story")
            out.register_hook(lambda grad: grad * math.nan) if out.requires_grad else None
            return out
        return fails

    eager = run(data, tmp_path / "a", "--max_steps=3")
    monkeypatch.setattr(torch, "compile", broken)
    assert same(eager, run(data, tmp_path / "b", "--max_steps=3", "--compile=True"))
    assert capsys.readouterr().out.count(f"compile: not possible here ({reason}); running eagerly\n") == 1


@pytest.mark.parametrize("kind", ["truncated", "garbled", "empty", "folder", "other", "partial"])
def test_resuming_from_what_is_no_checkpoint_is_refused(kind, data, tmp_path, capsys):
    """Oracle: one line that names the file, and code 2."""
    path = tmp_path / "ckpt.pt"
    if kind == "folder":
        path.mkdir()
    else:
        run(data, tmp_path, "--max_steps=1")
        whole = path.read_bytes()
        if kind in ("other", "partial"):
            torch.save([1, 2] if kind == "other" else {"model": {}, "config": {}}, path)
        else:
            path.write_bytes({"truncated": whole[:len(whole) // 2], "garbled": b"\x00" * 500, "empty": b""}[kind])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path, "--max_steps=2", "--init_from=resume")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and str(path) in error and error.count("\n") == 1


def test_a_checkpoint_that_cannot_be_written_keeps_the_one_before_and_fails(data, tmp_path, capsys, monkeypatch):
    """Oracle: the old bytes, and an exit code that is not 0."""
    run(data, tmp_path, "--max_steps=2")
    before = (tmp_path / "ckpt.pt").read_bytes()

    def full(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path, "--max_steps=4", "--init_from=resume")
    assert stopped.value.code == 1 and "No space left on device" in capsys.readouterr().out
    assert (tmp_path / "ckpt.pt").read_bytes() == before and sorted(os.listdir(tmp_path)) == [".lock", "ckpt.pt", "log.txt"]


@pytest.mark.parametrize("out", ["a_file", "a_file/below", ""])
def test_an_output_folder_that_cannot_be_is_refused(out, data, tmp_path, capsys):
    """Oracle: one line that names it, and code 2."""
    (tmp_path / "a_file").write_text("x")
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path / out if out else "", "--max_steps=1")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and (out or "out") in error and error.count("\n") == 1


MISTAKES = {"--n_layers=3": "unknown key 'n_layers'", "--n_embd=big": "n_embd", "--sigma=-1": "sigma", "--backprop_loops=9": "backprop_loops",
            "--device=cuda:77": "device", "--dtype=int8": "dtype", "--block_size=100000": "block_size", "--data=nowhere": "nowhere",
            "--schedule=step": "schedule", "--optimizer=sgd": "optimizer", "--muon_factor=-1": "muon_factor", "--n_head=5": "n_head", "missing.py": "missing.py", "train": "'train'", "--seed": "--seed",
            "--init_from=resume": "nothing to resume", "--mean_loops=9": "mean_loops", "--batch_size=0": "batch_size",
            "--seed=-1": "seed", "--learning_rate=1e999": "learning_rate", "--warmup_steps=-5": "warmup_steps",
            "--weight_decay=(10**60)**60": "weight_decay", "--vocab_size=5": "vocab_size", "--data=": "data"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_code_2(mistake, data, tmp_path, capsys):
    """Oracle: the line names the thing."""
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path / "out", mistake)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and MISTAKES[mistake] in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_configuration_file_is_data_not_a_program(tmp_path, capsys):
    """Oracle: what Python would make of the assignments; anything else is refused by line."""
    good = tmp_path / "good.py"
    good.write_text('"""doc"""\nbatch_size = 2**3\nmax_steps = batch_size * 10 - 1\nlearning_rate = 1\nout = "x"\ncompile = False\n')
    s = config.parse(train.Settings, "doc", [str(good), "--max_steps=2**2", "--out", "7"])
    assert (s.batch_size, s.max_steps, s.learning_rate, s.out, s.compile) == (8, 4, 1.0, "7", False)
    for text in ("import os", "max_steps = open('x')", "max_steps = 9**9**9", "max_steps += 1", "max_stepz = 1", "max_steps = 1.5",
                 "max_steps = (lambda: 3)()", "max_steps = 1 / 0", "max_steps = ", "out = 'a' * 10**9"):
        bad = tmp_path / "bad.py"
        bad.write_text(text)
        with pytest.raises(SystemExit) as stopped:
            config.parse(train.Settings, "doc", [str(bad)])
        assert stopped.value.code == 2 and str(bad) in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path):
    """Oracle: the parser and the settings' own checks."""
    config.parse(train.Settings, "doc", [str(path)])


def test_a_value_may_follow_its_key_after_a_space():
    """Oracle: the list written with equals signs; a switch takes no value, and what is no key stays."""
    joined = config.join_values(train.Settings, ["a.py", "--out", "x", "--compile", "b.py", "--seed=3", "--data"])
    assert joined == ["a.py", "--out=x", "--compile", "b.py", "--seed=3", "--data"]


def test_help_lists_every_setting(capsys):
    """Oracle: the fields of the dataclass."""
    with pytest.raises(SystemExit) as stopped:
        config.parse(train.Settings, train.__doc__, ["--help"])
    text = capsys.readouterr().out.split("settings, with their defaults")[1]
    assert stopped.value.code == 0
    for f in train.fields(train.Settings):
        default = re.search(rf"--{f.name}=(\S*) ", text)
        assert default and config.literal(default[1].strip('"')) == f.default, f.name
