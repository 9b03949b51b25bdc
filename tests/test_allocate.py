"""allocate.py against naive loops, the model's own halting and made-up examples, on a tiny random model and corpus."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import allocate as A
import config
import measure as M
from model import LoopConfig, LoopLM
from sample import score
from test_measure import BLOCK, MEAN_LOOPS, save, write_corpus

ROOT = Path(__file__).resolve().parent.parent
MAX_LOOPS = 6
QUICK = "--time_batch=2", "--time_batches=1", "--repeats=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocate")
    save(folder / "ckpt.pt", write_corpus(folder / "data"))
    return folder


@pytest.fixture(scope="module")
def example(folder):
    """Model, windows, a sample of tokens, and what one pass records of them."""
    model, _, corpus = M.load(folder / "ckpt.pt")
    x, y = corpus.windows("val", 640, BLOCK)
    sample = np.random.default_rng(0).random(x.shape) < 0.3
    recorded, features = A.record(model, x, y, MAX_LOOPS, 8, sample)
    return model, x, y, sample, recorded, features


def run(*args):
    return subprocess.run([sys.executable, str(ROOT / "allocate.py"), *map(str, args)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_labels_equal_a_naive_double_loop():
    """Oracle: the definition, token by token and loop by loop; A B A counts as a change at every loop but the last."""
    argmax = np.random.default_rng(0).integers(3, size=(200, 7))
    want = [[any(token[j] != token[i] for j in range(i + 1, 7)) for i in range(7)] for token in argmax]
    assert (A.will_change(argmax) == want).all() and 0 < np.mean(want) < 1
    assert A.will_change(np.array([[1, 2, 1], [1, 1, 1], [1, 1, 2]])).tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0]]


def test_exit_depth_and_its_loss_equal_a_naive_loop():
    """Oracle: the first loop below the threshold, else the last, found token by token; signals that rise again."""
    rng = np.random.default_rng(1)
    signal, loss = rng.random((40, 5, 7)).astype(np.float32), rng.random((40, 5, 7))
    signal[..., 0] = np.inf
    for threshold in (0.0, 0.1, 0.5, 2.0):
        depth = A.exit_depth(signal, threshold)
        for at in np.ndindex(40, 5):
            want = next((i for i in range(1, 8) if signal[at][i - 1] < threshold), 7)
            assert depth[at] == want and A.at_depth(loss, depth)[at] == loss[at][want - 1]


def test_recorded_states_and_losses_are_those_of_uniform_runs(example):
    """Oracle: model.forward at each depth, and the four methods."""
    model, x, y, sample, recorded, features = example
    with torch.inference_mode():
        idx = torch.from_numpy(x)
        e = model.prelude(idx)
        s = model.initial_state(e)
        for i in range(1, MAX_LOOPS + 1):
            s = model.loop_step(s, e)
            logits = model(idx, n_loops=i)[0]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten(), reduction="none")
            np.testing.assert_allclose(recorded["loss"][..., i - 1].ravel(), loss, atol=1e-4)
            assert (recorded["argmax"][..., i - 1] == logits.argmax(-1).numpy()).mean() > 0.99
            np.testing.assert_allclose(features[i - 1], s[torch.from_numpy(sample)], atol=1e-4)
            p = model(idx, n_loops=MAX_LOOPS)[0].double().log_softmax(-1)
            kl = (p.exp() * (p - logits.double().log_softmax(-1))).sum(-1)
            np.testing.assert_allclose(recorded["convergence"][..., i - 1], kl, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("rule", A.RULES)
def test_frontiers_from_arrays_equal_the_models_own_select(example, rule):
    """Oracle: model.forward_halting(mode="select") at eps across the range; a token may lie on the edge of eps."""
    model, x, y, _, recorded, _ = example
    eps_range = np.quantile(recorded[rule][np.isfinite(recorded[rule])], (0.1, 0.4, 0.7, 0.95))
    for eps in (0.0, *map(float, eps_range), 1e9):
        depth = A.exit_depth(recorded[rule], eps)
        loss, want = A.run_halting(model, x, y, rule, eps, MAX_LOOPS, "select", 8)
        same = depth == want
        assert (~same).sum() <= 2 and (depth.min(), depth.max()) == (want.min(), want.max())
        np.testing.assert_allclose(A.at_depth(recorded["loss"], depth)[same], loss[same], atol=1e-4)


def test_the_linear_router_is_logistic_regression_at_convergence():
    """Oracle: Newton's method on the same regularised loss, in numpy."""
    torch.manual_seed(0)
    x = torch.randn(1000, 8)
    label = torch.rand(1000) < (x @ torch.tensor([2.0, -1, 0, 0, 0, 0, 0, 0]) - 1).sigmoid()
    z, w = np.append(x.double().numpy(), np.ones((1000, 1)), 1), np.zeros(9)
    penalty = A.L2 * np.append(np.ones(8), 0)              # the bias goes free
    for _ in range(20):
        p = 1 / (1 + np.exp(-z @ w))
        w -= np.linalg.solve((z * (p * (1 - p))[:, None]).T @ z / 1000 + np.diag(penalty),
                             z.T @ (p - label.numpy()) / 1000 + penalty * w)
    np.testing.assert_allclose(A.train_linear(x, label)(x), 1 / (1 + np.exp(-z @ w)), atol=1e-4)


def test_only_the_two_layer_router_learns_a_ring():
    """Oracle: labels that no linear function of the features separates, on tokens not trained on."""
    torch.manual_seed(0)
    x = torch.randn(3000, 4)
    ring = x[:, :2].norm(dim=1) > 1.2
    for train, least, most in ((A.train_linear, 0.4, 0.65), (A.train_two_layer, 0.9, 1)):
        assert least < ((train(x[:2000], ring[:2000])(x[2000:]) > 0.5) == ring[2000:]).float().mean() < most


def test_a_router_whose_labels_never_change_is_finite():
    """Oracle: probabilities near zero, no failure: at late loops of a converged model no label is positive."""
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    for train in (A.train_linear, A.train_two_layer):
        p = train(x, torch.zeros(500, dtype=torch.bool))(x)
        assert p.isfinite().all() and p.max() < 0.1


@pytest.mark.parametrize("rule", ["kl", "state"])
@pytest.mark.parametrize("mode", ["uniform", "freeze", "skip"])
def test_flops_are_those_that_the_modes_spend(mode, rule):
    """
    Oracle: torch.utils.flop_counter. In float64, whose attention is plain matrix products that it can count; half of each
    sequence halts at loop 2, the last token at the end, so that no query is padding and each stands before all keys.
    """
    from torch.utils.flop_counter import FlopCounterMode
    model = LoopLM(LoopConfig(block_size=20, vocab_size=97, n_embd=32, n_head=2, n_kv_head=1, n_hidden=48, n_prelude=1, n_core=2,
                              n_coda=1)).double().eval()
    idx = torch.randint(0, 97, (3, 20))
    depth = torch.tensor([2] * 10 + [5] * 10).expand(3, 20)
    with FlopCounterMode(display=False) as counter:
        if mode == "uniform":
            model(idx, n_loops=5)
        else:
            model.forward_halting(idx, rule, max_loops=5, mode=mode, schedule=depth)
    policy, run = ("A0", 5) if mode == "uniform" else (f"A1_{rule}", depth if mode == "skip" else 5)
    expected = A.flops(policy, run, model.config, model.flops_per_token(20))
    assert counter.get_total_flops() == pytest.approx(idx.numel() * expected, rel=1e-9)


def test_flops_of_kl_count_every_check():
    """Oracle: the sum written out per token from the model's own count of prelude, loop and readout."""
    c, parts, depth = LoopConfig(n_embd=32, n_head=2, n_kv_head=1), (100.0, 1000.0, 50000.0), np.array([1, 3, 6])
    assert A.flops("A1_kl", depth, c, parts) == pytest.approx(np.mean([100 + d * 1000 + d * 50000 for d in depth]))
    for name in ("A0", "A1_state", "A1_accel", "oracle"):
        assert A.flops(name, depth, c, parts) == pytest.approx(np.mean([100 + d * 1000 + 50000 for d in depth]))
    assert A.flops("A2_linear", depth, c, parts) == pytest.approx(np.mean([100 + d * (1000 + 2 * 32) + 50000 for d in depth]))
    two_layer = 2 * (32 * A.HIDDEN + A.HIDDEN)
    assert A.flops("A2_two_layer", depth, c, parts) == pytest.approx(np.mean([100 + d * (1000 + two_layer) + 50000 for d in depth]))


def test_thresholds_run_from_nobody_exits_to_all_exit_at_once():
    """Oracle: the depths at both ends."""
    signal = np.random.default_rng(0).random((50, 8)).astype(np.float32) * 1e-3
    grid = A.thresholds(signal)
    assert grid == sorted(set(grid)) and len(grid) <= A.THRESHOLDS + 1
    assert (A.exit_depth(signal, grid[0]) == 8).all() and (A.exit_depth(signal, grid[-1]) == 1).all()
    means = [A.exit_depth(signal, t).mean() for t in grid]
    assert means == sorted(means, reverse=True) and -np.diff(means).min() < 0.5


def test_the_interval_is_paired_and_covers_a_known_difference():
    """Oracle: sequences that differ by nats, policies by 0.01: paired the interval is tight round it, mispaired it is not."""
    rng, covered = np.random.default_rng(0), 0
    for draw in range(40):
        a = rng.normal(3, 1, (60, 1)) + rng.normal(0, 0.02, (60, 20))
        b = a - 0.01 + rng.normal(0, 0.02, (60, 20))
        low, high = A.interval(a - b, draw)
        covered += low <= 0.01 <= high
        assert 0 < low < high < 0.02
    assert covered >= 34
    low, high = A.interval(a - rng.permutation(b), 0)
    assert high - low > 0.2
    assert A.interval(a - b, 3) == A.interval(a - b, 3)


def test_the_timer_interleaves_and_speed_ups_are_of_the_same_round():
    """Oracle: a clock that is told how long each call takes; the order of the calls; a ratio that a drift of 100x leaves alone."""
    now, calls = [0.0], []
    lasts = {"a": iter([50, 1, 9, 4, 100, 5]), "b": iter([70, 3, 2, 8, 30, 2.5])}

    def work(name):
        calls.append(name)
        now[0] += next(lasts[name])

    seconds = config.interleaved({name: lambda name=name: work(name) for name in lasts}, 5, clock=lambda: now[0])
    assert "".join(calls) == "ab" * 6                      # one round to warm up
    assert seconds == {"a": [1, 9, 4, 100, 5], "b": [3, 2, 8, 30, 2.5]}
    assert config.speedup(seconds["a"], seconds["b"]) == 2 == statistics.median([1 / 3, 9 / 2, 4 / 8, 100 / 30, 5 / 2.5])
    assert config.speedup([2, 200, 4], [1, 100, 2]) == 2


def test_scheduled_depths_have_the_mean_asked_for():
    """Oracle: the sample mean; all depths within range; the same seed, the same depths."""
    for mean in (1.5, 4.94, 7.5):
        depth = A.scheduled_depths(mean, 8, (500, 400), 0)
        assert depth.min() >= 1 and depth.max() <= 8 and depth.mean() == pytest.approx(mean, abs=0.03)
        assert (depth == A.scheduled_depths(mean, 8, (500, 400), 0)).all()
    assert (A.scheduled_depths(1, 8, (9,), 0) == 1).all() and (A.scheduled_depths(8, 8, (9,), 0) == 8).all()


def test_choose_takes_the_shallowest_that_matches():
    """Oracle: points made up so that the answer is plain."""
    points = [{"mean_depth": depth, "loss": loss} for depth, loss in ((8, 1.0), (5, 1.0019), (6, 0.9), (3, 1.0021))]
    assert A.choose(points, 1.0)["mean_depth"] == 5 and A.choose(points, 0.5) is None


@pytest.fixture(scope="module")
def results(folder):
    """The command twice, in full."""
    found = []
    for _ in range(2):
        done = run(f"--ckpt={folder}/ckpt.pt", f"--data={folder}/data", "--tokens=640", *QUICK)
        assert done.returncode == 0, done.stderr
        found.append((json.loads((folder / "allocate.json").read_text()), done.stdout))
        (folder / "allocate.json").unlink()
    return found


def test_the_command_reports_every_policy_and_the_same_twice(folder, results):
    """Oracle: the first run; the keys that issue 3 names; figures that fit together."""
    (r, out), (again, _) = results
    assert (folder / "allocate.png").read_bytes()[:4] == b"\x89PNG" and not list(folder.glob("*.part"))
    assert set(r) == {"policies", "modes", "decode", "token_types", "wall_clock", "meta"}
    assert set(r["policies"]) == {"A0", "A1_kl", "A1_state", "A1_accel", "A2_linear", "A2_two_layer", "oracle", "oracle_convergence"}
    assert [p["mean_depth"] for p in r["policies"]["A0"]["frontier"]] == list(range(1, MEAN_LOOPS + 1))
    for name, policy in r["policies"].items():
        assert all(set(p) == {"threshold", "mean_depth", "loss", "flops_per_token"} for p in policy["frontier"])
        assert {"threshold", "mean_depth", "loss", "loss_difference", "interval"} <= set(policy["match"])
        low, high = policy["match"]["interval"]
        assert low <= policy["match"]["loss_difference"] <= high
        if name != "A0":
            assert policy["frontier"][0]["mean_depth"] == MEAN_LOOPS and len(policy["frontier"]) <= 42
    full = r["policies"]["A0"]["frontier"][-1]
    assert r["policies"]["A1_kl"]["frontier"][0]["loss"] == full["loss"]
    assert r["policies"]["A1_kl"]["frontier"][0]["flops_per_token"] > full["flops_per_token"]        # its checks
    for rule in A.RULES:
        modes = r["modes"][rule]
        assert set(modes) == {"select", "freeze", "skip"}
        assert modes["select"]["mean_depth"] == r["policies"][f"A1_{rule}"]["match"]["mean_depth"]
        assert modes["skip"]["mean_depth"] == pytest.approx(modes["freeze"]["mean_depth"], abs=0.02)
        assert modes["skip"]["loss"] == pytest.approx(modes["freeze"]["loss"], abs=1e-3)
        decoded, match = r["decode"].get(rule), r["policies"][f"A1_{rule}"]["match"]
        if decoded is None:                                # no threshold matches over the cache of the last loop
            continue
        assert decoded["threshold"] <= match["threshold"] and f"decode_{rule}: threshold {decoded['threshold']:.6g}" in out
        assert 1 <= decoded["mean_depth"] <= MEAN_LOOPS and decoded["interval"][0] <= decoded["loss_difference"] <= decoded["interval"][1]
    for by_type in r["token_types"]["kl"].values():
        assert sum(t["tokens"] for t in by_type.values()) == r["meta"]["tokens"] // 2
        mean = sum(t["tokens"] * t["mean_depth"] for t in by_type.values()) / (r["meta"]["tokens"] // 2)
        assert mean == pytest.approx(r["modes"]["kl"]["select"]["mean_depth"])
    base = r["wall_clock"][f"uniform_{MEAN_LOOPS}"]
    assert set(r["wall_clock"]) >= {"freeze_state", "skip_kl", "skip_state", "skip_accel"} and base["over_mean"]["speedup"] == 1
    for row in r["wall_clock"].values():
        assert row["over_mean"]["speedup"] > 0 and row["ms_per_1000_tokens"] > 0
        assert row["over_mean"]["share_of_bound"] == pytest.approx(row["over_mean"]["speedup"] / row["over_mean"]["bound"])
    assert "A0_min: threshold" in out and "time_skip_state: mean_depth" in out
    r.pop("wall_clock"), again.pop("wall_clock")
    assert r == again


def test_what_is_chosen_does_not_depend_on_the_reported_half(folder, results, tmp_path, monkeypatch):
    """Oracle: the same command with the text of sequences 1, 3, 5, ... replaced: the same thresholds, other losses."""
    real = A.load

    def garbled(*args):
        model, ckpt, corpus = real(*args)
        x, y = (w.copy() for w in corpus.windows("val", 640, BLOCK))
        x[1::2], y[1::2] = x[1::2][::-1] // 2, y[1::2] // 2
        corpus.windows = lambda *args: (x, y)
        return model, ckpt, corpus

    (tmp_path / "ckpt.pt").write_bytes((folder / "ckpt.pt").read_bytes())
    monkeypatch.setattr(A, "load", garbled)
    monkeypatch.setattr(sys, "argv", ["allocate.py", f"--ckpt={tmp_path}/ckpt.pt", f"--data={folder}/data", "--tokens=640", *QUICK])
    A.main()
    other, r = json.loads((tmp_path / "allocate.json").read_text()), results[0][0]
    for name, policy in r["policies"].items():
        assert other["policies"][name]["match"]["threshold"] == policy["match"]["threshold"]
        assert [p["threshold"] for p in other["policies"][name]["frontier"]] == [p["threshold"] for p in policy["frontier"]]
        assert other["policies"][name]["match"]["loss"] != policy["match"]["loss"]
    assert r["decode"] and {rule: m["threshold"] for rule, m in other["decode"].items()} == {rule: m["threshold"] for rule, m in r["decode"].items()}


def test_loosest_finds_the_last_threshold_that_matches():
    """Oracle: a scan. Where matching is monotonous the answer is at most so many parts of the grid too strict, never too loose."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 50, 401):
        for last in {0, n - 1, *rng.integers(n, size=5).tolist()}:
            for parts in (16, 64, 1000):
                asked = []
                at = A.loosest(list(range(n)), lambda t: asked.append(t) or t <= last, parts)
                assert last - max(1, n // parts) < at <= last and asked[0] == n - 1 and len(asked) <= 11


def test_the_threshold_for_decoding_matches_on_the_sequences_that_chose_it(folder, results, example):
    """Oracle: sample.score on sequences 0, 4, 8, ... against uniform depth at the training mean."""
    model, x, y, _, recorded, _ = example
    for rule, decoded in results[0][0]["decode"].items():
        loss, _ = score(model, x[::4], y[::4], rule, decoded["threshold"], MEAN_LOOPS)
        assert (loss - recorded["loss"][::4, :, MEAN_LOOPS - 1]).mean() <= A.TOLERANCE + 1e-6


def test_schedule_times_skip_with_a_checkpoint_or_random_weights(folder, tmp_path):
    """Oracle: the file and the lines that must come, labelled as scheduled."""
    done = run(f"--ckpt={folder}/ckpt.pt", "--schedule=2.5", "--tokens=640", *QUICK)
    assert done.returncode == 0, done.stderr
    r = json.loads((folder / "allocate_scheduled.json").read_text())
    assert set(r) == {"meta", "wall_clock"} and set(r["wall_clock"]) == {"uniform_3", "skip_state_scheduled", "skip_kl_scheduled"}
    assert r["wall_clock"]["skip_state_scheduled"]["mean_depth"] == pytest.approx(2.5, abs=0.2)
    (tmp_path / "shape.py").write_text("block_size = 32\nn_embd = 32\nn_head = 2\nn_kv_head = 1\nn_hidden = 4 * n_embd\n"
                                       "vocab_size = 300\nmean_loops = 4\n")
    done = run(f"--config={tmp_path}/shape.py", "--schedule=2.5", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "scheduled exits of mean 2.5" in done.stdout and "time_skip_state_scheduled: mean_depth 2." in done.stdout


def test_every_mistake_is_one_line_and_exit_code_2(folder, tmp_path, monkeypatch, capsys):
    """Oracle: the exit code, and words that the line must hold."""
    (tmp_path / "bad.py").write_text("n_embd = 33\n")
    (tmp_path / "key.py").write_text("n_embdd = 32\n")
    (tmp_path / "garbled.pt").write_bytes(b"nonsense")
    mistakes = [([f"--ckpt={tmp_path}/none.pt"], "no checkpoint"), ([f"--ckpt={tmp_path}/garbled.pt"], "not a whole checkpoint"),
                ([f"--data={tmp_path}/nowhere"], "nowhere"), (["--block_size=64"], "context of 32"), (["--tokens=127"], "at least 128"),
                (["--max_loops=2"], "training mean, 3"), (["--repeats=0"], "repeats"), (["--dtype=float16"], "dtype"),
                (["--schedule=9"], "between 1 and 3"), (["--schedule=0.5"], "between 1 and 3"), (["--config=x.py"], "schedule"),
                ([f"--config={tmp_path}/none.py", "--schedule=2"], "none.py"), ([f"--config={tmp_path}/bad.py", "--schedule=2"], "n_head"),
                ([f"--config={tmp_path}/key.py", "--schedule=2"], "n_embdd"), (["--device=toaster"], "toaster"), (["--tokns=3"], "tokens")]
    for args, words in mistakes:
        monkeypatch.setattr(sys, "argv", ["allocate.py", f"--ckpt={folder}/ckpt.pt", *args])
        with pytest.raises(SystemExit) as stop:
            A.main()
        line = capsys.readouterr().err
        assert stop.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and words in line, (args, line)
