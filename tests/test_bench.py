"""bench.py on a tiny random model: what it counts, not how fast it is."""

import re
import subprocess
import sys
import os
from pathlib import Path

import pytest
import torch

import bench
from model import LoopConfig, LoopLM, load_checkpoint
from sample import Decoder
from test_measure import save, write_corpus
from test_model import make, tokens

ROOT = Path(__file__).resolve().parent.parent


def run(*args):
    return subprocess.run([sys.executable, str(ROOT / "bench.py"), *map(str, args)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("wait", [0, 0.75, 1])
def test_timed_decoding_keeps_the_depths_that_were_drawn(wait):
    """Oracle: the table of depths itself; in lockstep every slot makes the same number of tokens."""
    model, text = make(), tokens(4, 24).tolist()
    table = torch.randint(1, 5, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = Decoder(model, 4, "state", 0.0, 4, wait, depth_of=lambda slot, position: table[slot][position])
    with torch.inference_mode():
        for slot in range(4):
            decoder.prefill(slot, text[slot][:3])
        for _ in range(2):                                 # a second run starts where the first did
            depths = bench.decode_run(decoder, text, 3, 24)
            made = [position - 3 for position in decoder.position]
            assert 24 <= len(depths) == sum(made) < 28 and (wait < 1 or made == [6] * 4)
            assert sorted(depths) == sorted(table[slot][3 + i] for slot in range(4) for i in range(made[slot]))


def test_the_command_compares_lockstep_and_continuous_decoding(tmp_path):
    """Oracle: the lines that must come; a speed-up is a ratio of rates, and uniform depth's own is 1."""
    save(tmp_path / "ckpt.pt", write_corpus(tmp_path / "data"))
    shape = ("--batch=1,3", "--prompt_tokens=4", "--tokens=6", "--repeats=2")
    done = run("decode", f"--ckpt={tmp_path}/ckpt.pt", "--uniform=2", "--eps=0.2", *shape)
    assert done.returncode == 0, done.stderr
    rows = {name: dict(re.findall(r"(\w+) ([\d.]+)", rest)) for name, rest in re.findall(r"^(decode_\S+): (.*)$", done.stdout, re.MULTILINE)}
    assert {"decode_1_uniform_3", "decode_1_uniform_2", "decode_1_state", "decode_3_uniform_3", "decode_3_state_lockstep", "decode_3_state_lockstep_masked",
            "decode_3_state_continuous_wait_0", "decode_3_state_continuous_wait_0.75"} <= set(rows)
    for name, row in rows.items():
        assert float(row["speedup"]) > 0 and float(row["tokens_per_second"]) > 0
    assert rows["decode_3_uniform_3"]["speedup"] == rows["decode_3_uniform_3"]["bound"] == "1.000"
    assert float(rows["decode_3_state_lockstep_masked"]["mean_depth"]) >= float(rows["decode_3_state_lockstep"]["mean_depth"])
    assert rows["decode_1_uniform_2"]["mean_depth"] == "2.000" and float(rows["decode_1_uniform_2"]["bound"]) > 1
    done = run("decode", f"--ckpt={tmp_path}/ckpt.pt", "--rule=kl", "--eps=0.001", "--batch=2", "--uniform=2", *shape[1:])
    model, _ = load_checkpoint(tmp_path / "ckpt.pt")       # bounds: FLOPs by hand, where kl pays a readout for each loop
    prelude, loop, readout = model.flops_per_token(4 + 6 // 2)
    for name, mean, bound in re.findall(r"^decode_(2_\S+): mean_depth ([\d.]+) .* bound ([\d.]+)", done.stdout, re.MULTILINE):
        checks = float(mean) if "kl" in name else 1
        assert float(bound) == pytest.approx((prelude + 3 * loop + readout) / (prelude + float(mean) * loop + checks * readout), rel=2e-3)
    assert "decode_2_kl_lockstep" in done.stdout
    (tmp_path / "shape.py").write_text("block_size = 32\nn_embd = 32\nn_head = 2\nn_kv_head = 1\nn_hidden = 64\nvocab_size = 300\nmean_loops = 4\n")
    done = run("decode", f"--config={tmp_path}/shape.py", "--schedule=2.5", *shape)
    assert done.returncode == 0 and "drawn depths of mean 2.5" in done.stdout, done.stderr


PEER = """
import torch
class GPTConfig:
    def __init__(self, **kwargs):
        self.__dict__ |= kwargs
class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        assert c.n_layer == 2 + 1 * 3 + 2
        self.wte = torch.nn.Embedding(c.vocab_size, c.n_embd)
    def forward(self, x, y):
        logits = self.wte(x) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def test_training_is_timed_beside_a_peer_and_work_is_counted_by_hand(tmp_path, capsys, monkeypatch):
    """Oracle: MFU times the peak is the rate times the FLOPs of a token, from the model's own count; r beyond backprop_loops costs a third."""
    (tmp_path / "shape.py").write_text("block_size = 32\nn_embd = 32\nn_head = 2\nn_kv_head = 1\nn_hidden = 64\nvocab_size = 300\nmean_loops = 4\n"
                                       "backprop_loops = 2\nbatch_size = 3\n")
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(bench, "peak_flops", lambda *args: 1e9)
    monkeypatch.setattr(bench.trainer, "compile_parts", lambda *args: "not here")
    bench.train(bench.Settings(config=f"{tmp_path}/shape.py", core_blocks=1, loops=3, repeats=2, device="cpu", dtype="float32",
                               vs=f"nanogpt:{tmp_path}/peer.py"))
    out = capsys.readouterr().out
    rows = {name: dict(re.findall(r"(\w+) ([\d.]+)", rest)) for name, rest in re.findall(r"^(train_\S+): (.*)$", out, re.MULTILINE)}
    assert set(rows) == {"train_eager", "train_nanogpt_eager", "train_nanogpt_compiled"} and "not here" in out
    assert rows["train_eager"]["eager_over_it"] == "1.000" and float(rows["train_nanogpt_eager"]["eager_over_it"]) < 1
    c = LoopConfig(block_size=32, n_embd=32, n_head=2, n_kv_head=1, n_hidden=64, vocab_size=300, n_core=1)
    prelude, loop, readout = LoopLM(c).flops_per_token(32)
    assert float(rows["train_eager"]["mfu"]) * 1e9 == pytest.approx(
        float(rows["train_eager"]["tokens_per_second"]) * (3 * (prelude + readout) + 7 * loop), rel=5e-3)


def test_scoring_is_timed_for_all_ways_and_its_bound_counts_flops(tmp_path):
    """Oracle: the lines that must come, the bound by hand from the mean of the drawn depths."""
    (tmp_path / "shape.py").write_text("block_size = 32\nn_embd = 32\nn_head = 2\nn_kv_head = 1\nn_hidden = 64\nvocab_size = 300\nmean_loops = 4\n")
    done = run("skip", f"--config={tmp_path}/shape.py", "--schedule=2.5", "--batch_size=2", "--repeats=1", "--rule=kl")
    assert done.returncode == 0, done.stderr
    rows = {name: dict(re.findall(r"(\w+) ([\d.]+)", rest)) for name, rest in re.findall(r"^(skip_\S+): (.*)$", done.stdout, re.MULTILINE)}
    assert set(rows) == {"skip_uniform", "skip_uniform_compiled", "skip_uniform_captured", "skip_skip", "skip_skip_captured", "skip_skip_captured_late"}
    mean = float(re.search(r"depths of mean ([\d.]+)", done.stdout)[1])
    c = LoopConfig(block_size=32, n_embd=32, n_head=2, n_kv_head=1, n_hidden=64, vocab_size=300)
    prelude, loop, readout = LoopLM(c).flops_per_token(32)
    assert float(rows["skip_skip"]["bound"]) == pytest.approx((prelude + 4 * loop + readout) / (prelude + mean * (loop + readout)), rel=1e-2)


MISTAKES = {(): "say what to time", ("train", "--vs=gpt2"): "--vs=gpt2 must be", ("train", "--vs=nanogpt:nowhere.py"): "must be name:PATH",
            ("train", "--config=nowhere.py"): "nowhere.py", ("train", "--vs=nanogpt:config/tiny.py"): "cannot be timed", ("skip",): "--schedule=0",
            ("gpu", "--device=cpu"): "no CUDA device", ("sleep",): "say what to time", ("decode", "--batch=0"): "batch must be numbers of slots", ("decode", "--wait=2"): "wait must be",
            ("decode", "--ckpt=nowhere.pt"): "no checkpoint", ("decode", "--config=config/tiny.py"): "--config goes with --schedule",
            ("decode", "--config=config/tiny.py", "--schedule=99"): "--schedule=99 must lie", ("decode", "--config=config/tiny.py", "--schedule=2",
            "--tokens=250"): "exceed the context"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_one_line_and_exit_code_2(mistake, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["bench.py", *mistake])
    with pytest.raises(SystemExit) as exit:
        bench.main()
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.count("\n") == 1 and MISTAKES[mistake] in err, err
