"""bench.py on a tiny random model: what it counts, not how fast it is."""

import re
import subprocess
import sys
import os
from pathlib import Path

import pytest
import torch

import bench
from model import load_checkpoint
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


MISTAKES = {(): "say what to time", ("sleep",): "say what to time", ("decode", "--batch=0"): "batch must be slots", ("decode", "--wait=2"): "wait must be",
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
