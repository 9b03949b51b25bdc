"""measure.py against direct computation, numpy and hand-written examples, on a tiny random model and a tiny corpus."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import measure as M
from model import LoopConfig, LoopLM
from prepare_data import Corpus, encode, token_bytes
from sample import score

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("It's the 42nd test of a loop, isn't it? def self_attn(x): return x + 1.5\n\n    \"Whatever converges\" -- caf\u00e9.\n" * 40).encode()
MAX_DEPTH, MEAN_LOOPS, BLOCK = 12, 3, 32


def write_corpus(folder, tokenizer="byte", vocab_size=257, eot=256):
    """Shards in llm.c's format, written here by hand: two validation documents in two shards."""
    folder.mkdir()
    splits = {}
    for split, n in (("train", 1), ("val", 2)):
        shards = []
        for i in range(n):
            ids = np.append(eot, np.frombuffer(TEXT[i * 1000:], np.uint8)).astype("<u2")
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(ids)
            (folder / f"tiny_{split}_{i:06d}.bin").write_bytes(header.tobytes() + ids.tobytes())
            shards.append({"file": f"tiny_{split}_{i:06d}.bin", "tokens": len(ids)})
        splits[split] = {"tokens": sum(s["tokens"] for s in shards), "documents": n, "shards": shards}
    (folder / "meta.json").write_text(json.dumps({"name": "tiny", "tokenizer": tokenizer, "vocab_size": vocab_size, "eot": eot,
                                                  "splits": splits}))
    return Corpus(folder)


def save(path, corpus, change=lambda model: None, **overrides):
    """A checkpoint such as train.py writes, of a random model."""
    torch.manual_seed(0)
    c = LoopConfig(block_size=BLOCK, vocab_size=257, n_embd=32, n_head=2, n_kv_head=1, n_hidden=64, n_prelude=1, n_core=1,
                   n_coda=1, mean_loops=MEAN_LOOPS, backprop_loops=2)
    model = LoopLM(c)
    with torch.no_grad():
        model.wte.weight.mul_(3)                 # sharper distributions: depths between 2 and never
        change(model)
    torch.save({"model": model.state_dict(), "optimizers": [], "step": 7, "config": asdict(c), "data": corpus.identity,
                "settings": {"data": str(corpus.folder), "seed": 1}, "val_loss_by_depth": {}, "meta": {}} | overrides, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The model is too small for two, and the processor may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    save(folder / "ckpt.pt", write_corpus(folder / "data"))
    return folder


@pytest.fixture(scope="module")
def direct(folder):
    """Model, windows, and per loop the state and the readout's log-probabilities, from the four methods in float64."""
    model, _, corpus = M.load(folder / "ckpt.pt")
    x, y = corpus.windows("val", 640, BLOCK)
    double = M.load(folder / "ckpt.pt")[0].double()
    with torch.inference_mode():
        e = double.prelude(torch.from_numpy(x))
        states, log_p = [double.initial_state(e)], [None]
        for _ in range(MAX_DEPTH):
            states.append(double.loop_step(states[-1], e))
            log_p.append(double.readout(states[-1]).log_softmax(-1))
    types = np.stack([M.token_types(w.ravel(), token_bytes("byte")).reshape(w.shape) for w in (x, y)])
    return model, x, y, types, states, log_p


@pytest.fixture(scope="module")
def raw(direct):
    model, x, y, types, _, _ = direct
    return M.measure(model, x, y, types, MAX_DEPTH, batch_size=8)


def run(*args, cwd=ROOT):
    return subprocess.run([sys.executable, str(ROOT / "measure.py"), *map(str, args)], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_losses_kl_and_state_change_equal_a_direct_computation(direct, raw):
    """Oracle: the four methods unrolled in float64, and the definitions written out."""
    _, x, y, types, states, log_p = direct
    targets = torch.from_numpy(y)[..., None]
    assert list(raw["nats"]) == [1, 2, 3, 4, 5, 6, 8, 12]
    for i in range(1, MAX_DEPTH + 1):
        change = (states[i] - states[i - 1]).norm(dim=-1) / states[i].norm(dim=-1)
        assert raw["change"][i].summary()["mean"] == pytest.approx(change.mean().item(), rel=1e-4)
        loss = -log_p[i].gather(-1, targets)[..., 0]
        if i in raw["nats"]:
            assert raw["nats"][i] / y.size == pytest.approx(loss.mean().item(), abs=1e-5)
        if i == MEAN_LOOPS:
            for role in (0, 1):
                want = [loss.numpy()[types[role] == t].sum() for t in range(len(M.TYPES))]
                assert raw["type_nats"][role] == pytest.approx(want, rel=1e-5)
        if i > 1:
            kl = (log_p[i].exp() * (log_p[i] - log_p[i - 1])).sum(-1)
            assert raw["kl"][i].summary()["mean"] == pytest.approx(kl.mean().item(), rel=1e-3, abs=1e-10)


def test_depths_equal_a_naive_loop_over_tokens(direct, raw):
    """Oracle: for every token the definitions, spelt out, on KL from float64; a few tokens may lie on the edge of eps."""
    _, x, _, types, _, log_p = direct
    kl = np.stack([(log_p[i].exp() * (log_p[i] - log_p[i - 1])).sum(-1).numpy().ravel() for i in range(2, MAX_DEPTH + 1)])
    for k, eps in enumerate(M.EPS):
        want = np.zeros((2, len(M.TYPES), MAX_DEPTH + 2), np.int64)
        for token, kind in zip(kl.T, types[0].ravel()):
            first = next((i for i, value in enumerate(token, 2) if value < eps), MAX_DEPTH + 1)
            settled = next((i for i in range(2, MAX_DEPTH + 1) if (token[i - 2:] < eps).all()), MAX_DEPTH + 1)
            want[0, kind, first] += 1
            want[1, kind, settled] += 1
        assert np.abs(raw["counts"][:, k, 0] - want).sum() <= 4
        assert (raw["counts"][:, k].sum((2, 3)) == x.size).all()
    assert len(np.flatnonzero(raw["counts"].sum((0, 1, 2, 3)))) > 4            # the example is worth testing on


class Scripted(torch.nn.Module):
    """Stands for a model: the KL of each token and loop is written beforehand."""

    def __init__(self, kl, mean_loops):
        super().__init__()
        self.kl, self.wte = kl, torch.nn.Embedding(2, 2)
        self.config = type("Config", (), {"mean_loops": mean_loops})

    def prelude(self, idx):
        self.loop = 0
        return torch.ones(*idx.shape, 2)

    initial_state = staticmethod(torch.zeros_like)

    def loop_step(self, s, e):
        self.loop += 1
        return e

    def readout(self, s):
        return self.kl[self.loop - 1].expand(*s.shape[:2])[..., None].expand(*s.shape[:2], 2)


def test_first_and_settled_depth_on_random_signals(monkeypatch):
    """Oracle: a naive double loop, on signals that rise again after they fell, and some that never fall."""
    torch.manual_seed(0)
    signal, shape = 10 ** (torch.rand(9, 20, 15) * 4 - 5), (20, 15)            # loop, row, position; 1e-5 to 1e-1
    monkeypatch.setattr(M, "kl_signal", lambda logits, previous: logits[..., 0])
    x, types = np.zeros(shape, np.int64), np.zeros((2, *shape), np.uint8)
    counts = M.measure(Scripted(signal, 4), x, x, types, max_depth=9, batch_size=20)["counts"]
    for k, eps in enumerate(M.EPS):
        first, settled = np.zeros(11, int), np.zeros(11, int)
        for token in signal.flatten(1).T.tolist():
            at = 10
            for i in range(9, 1, -1):
                if token[i - 1] < eps:
                    at = i
            first[at] += 1
            at = 10
            for i in range(9, 1, -1):
                if token[i - 1] >= eps:
                    break
                at = i
            settled[at] += 1
        assert counts[0, k, 0, 0].tolist() == first.tolist() and counts[1, k, 0, 0].tolist() == settled.tolist()
        assert settled[10] > 0


def test_depth_summary_counts_a_token_that_never_settles_as_the_last_loop_and_as_moving():
    """Oracle: numpy over the depths written out one by one."""
    counts = np.array([0, 0, 5, 3, 1, 1, 2])                                   # max_depth 5; two tokens never
    d = M.depth_summary(counts, mean_loops=3)
    depths = [2] * 5 + [3] * 3 + [4, 5, 5, 5]
    assert d["mean"] == pytest.approx(np.mean(depths)) and d["still_moving"] == 4 / 12
    assert (d["median"], d["p90"]) == tuple(np.quantile(depths, q, method="inverted_cdf") for q in (0.5, 0.9))
    assert d["histogram"] == {"2": 5, "3": 3, "4": 1, "5": 1, "never": 2}
    assert M.depth_summary(counts, mean_loops=8)["still_moving"] == 2 / 12     # beyond the last loop: those that never do


def test_histogram_quantiles_equal_numpy_within_a_bin():
    """Oracle: numpy's quantiles of the values themselves; half a bin is 1.2 %."""
    values = np.exp(np.random.default_rng(0).normal(-12, 6, 50_000))
    h = M.LogHistogram()
    for part in np.array_split(values, 7):
        h.add(part)
    for q in (0.5, 0.9, 0.99):
        assert h.quantile(q) == pytest.approx(np.quantile(values, q, method="inverted_cdf"), rel=0.012)
    assert h.summary()["mean"] == pytest.approx(values.mean(), rel=1e-12)
    zeros = M.LogHistogram()
    zeros.add(np.zeros(3))
    assert zeros.summary() == {"mean": 0.0, "median": 0.0, "p90": 0.0, "p99": 0.0}


LETTERS = dict(zip(" .0fcw", range(6)))          # whitespace, punctuation, number, function, content, word-internal


def types_of(pieces):
    return "".join(list(LETTERS)[t] for t in M.token_types(np.arange(len(pieces)), pieces))


def test_token_types_of_bytes():
    """Oracle: written by hand, a letter under each byte (LETTERS)."""
    for text, want in (("The cat's 42 _x\n",         "fww cwwww 00 .c "),
                       ("don't self_attn, is2 3rd",  "fwwww cwww.cwww. fw0 0cw"),
                       ("f('of') b'in' O'Hara",      "c..fw.. c.fw. c.cwww"),
                       ("café naïve",                "cwwww cwwwww"),
                       ("isn’t “the—end”",           "fwwwwww ...fww...cww...")):
        assert types_of([bytes([b]) for b in text.encode()]) == want
    assert types_of([b"a", b"n", b"", b"d"]) == "fw c"                         # end of text separates, as whitespace
    assert types_of([b"", b""]) == "  " and types_of([b" "]) == " "


def test_token_types_of_gpt2_pieces():
    """Oracle: written by hand, a letter for each piece (LETTERS)."""
    pieces = [b"The", b" anth", b"rop", b"ologist", b" didn", b"'t", b" see", b" 19", b"45", b"\n\n", b"\"", b"In", b" deed",
              b" cour", b"age", b"\xe2", b"\x80", b"\x99", b"s", b" (", b"a", b")", b"  ", b" \xc3", b"\xa9", b"t", b"", b"he", b"re"]
    assert types_of(pieces) == "fcwwfwc00 .fccwwwww.f. cww fw"


def test_token_types_of_gpt2_text(gpt2_files):
    """Oracle: written by hand; the ids are tiktoken's own."""
    ids, pieces = encode("gpt2", "The 3 unbelievably small cats aren't _here_."), token_bytes("gpt2")
    kinds = {pieces[i].decode(): list(LETTERS)[t] for i, t in zip(ids, M.token_types(ids, pieces))}
    want = {"The": "f", " 3": "0", " small": "c", " cats": "c", " aren": "f", "'t": "w", " _": ".", "here": "f", "_.": "."}
    assert want.items() <= kinds.items()
    assert [t for piece, t in kinds.items() if piece not in want] == ["c"] + ["w"] * (len(kinds) - len(want) - 1)


def test_token_types_do_not_depend_on_where_the_text_is_cut_into_tokens():
    """Oracle: the types of single bytes; a piece is typed as its first byte that is not a space."""
    rng, single = np.random.default_rng(0), M.token_types(np.frombuffer(TEXT, np.uint8), token_bytes("byte"))
    cuts = np.unique(np.append(rng.integers(1, len(TEXT), 1500), (0, len(TEXT))))
    pieces = [TEXT[a:b] for a, b in zip(cuts, cuts[1:])]
    want = [next((t for t in single[a:b] if t != M.WHITESPACE), M.WHITESPACE) for a, b in zip(cuts, cuts[1:])]
    assert M.token_types(np.arange(len(pieces)), pieces).tolist() == want


def test_nothing_depends_on_the_batch_size(direct, raw):
    """Oracle: batches of another size, and all sequences at once."""
    model, x, y, types, _, _ = direct
    for batch_size in (3, 1000):
        other = M.measure(model, x, y, types, MAX_DEPTH, batch_size)
        for depth, nats in raw["nats"].items():
            assert other["nats"][depth] / x.size == pytest.approx(nats / x.size, abs=1e-5)
        for key in ("kl", "change"):
            for i in raw[key]:
                assert other[key][i].summary()["mean"] == pytest.approx(raw[key][i].summary()["mean"], rel=1e-3, abs=1e-5)
        assert np.abs(other["counts"] - raw["counts"]).sum() <= 8              # a token on the edge of eps


def test_report_divides_by_tokens_and_bytes_and_finds_the_saturation_depth():
    """Oracle: figures made up so that the answer is plain: 10 tokens of 40 bytes; depth 2 is within 0.002 nats, depth 1 not."""
    counts = np.zeros((2, len(M.EPS), 2, len(M.TYPES), 5), np.int64)
    counts[..., 0, 2] = counts[..., 4, 3] = 5
    raw = {"nats": {1: 10.03, 2: 10.015, 3: 10.0}, "type_nats": np.array([[2.5, 0, 0, 0, 7.5, 0]] * 2), "kl": {}, "change": {},
           "counts": counts}
    r = M.report(raw, mean_loops=3, n_tokens=10, n_bytes=40)
    assert r["saturation_depth"] == 2 and r["loss_by_depth"]["3"] == 1.0
    assert r["bits_per_byte_by_depth"]["3"] == pytest.approx(np.log2(np.e) / 4)
    assert list(r["token_types"]["read"]) == ["whitespace", "content_word"]
    assert [r["token_types"]["read"][name]["loss"] for name in ("whitespace", "content_word")] == [0.5, 1.5]


def test_the_command_writes_the_same_bytes_twice(folder, direct):
    """Oracle: the first run. And what the files must hold: the keys that issue 2 names, figures that fit together."""
    args = f"--ckpt={folder}/ckpt.pt", "--tokens=640", f"--max_depth={MAX_DEPTH}"
    written = []
    for _ in range(2):
        done = run(*args)
        assert done.returncode == 0, done.stderr
        written.append((folder / "measure.json").read_bytes())
        (folder / "measure.json").unlink()
    assert written[0] == written[1]
    assert (folder / "measure.png").read_bytes()[:4] == b"\x89PNG" and not list(folder.glob("*.part"))
    r = json.loads(written[0])
    assert set(r) == {"loss_by_depth", "bits_per_byte_by_depth", "kl_by_loop", "state_change_by_loop", "depth", "token_types",
                      "saturation_depth", "cache", "cache_check", "meta"}
    assert set(r["loss_by_depth"]) == set("1 2 3 4 5 6 8 12".split())
    assert set(r["kl_by_loop"]) == {str(i) for i in range(2, 13)} and set(r["state_change_by_loop"]) == {str(i) for i in range(1, 13)}
    assert set(r["kl_by_loop"]["2"]) == {"mean", "median", "p90", "p99"}
    assert set(r["depth"]) == {"0.01", "0.001", "0.0001"} and set(r["depth"]["0.001"]) == {"first", "settled"}
    for role, kinds in zip(("read", "predicted"), direct[3]):
        types = r["token_types"][role]
        assert [types[name]["tokens"] for name in M.TYPES] == np.bincount(kinds.ravel(), minlength=len(M.TYPES)).tolist()
        assert sum(t["tokens"] for t in types.values()) == r["meta"]["tokens"] == 640
        mean = sum(t["tokens"] * t["depth"]["0.001"]["settled"]["mean"] for t in types.values()) / 640
        assert mean == pytest.approx(r["depth"]["0.001"]["settled"]["mean"])
        assert sum(t["tokens"] * t["loss"] for t in types.values()) / 640 == pytest.approx(r["loss_by_depth"]["3"])
    assert r["bits_per_byte_by_depth"]["3"] == pytest.approx(r["loss_by_depth"]["3"] / np.log(2) * 640 / r["meta"]["bytes"])
    best = min(r["loss_by_depth"].values())
    assert r["saturation_depth"] == min(int(d) for d, loss in r["loss_by_depth"].items() if loss <= best + 0.002)
    assert f"saturation_depth: {r['saturation_depth']}\n" in done.stdout


def test_the_cache_gap_is_zero_at_depth_1_and_elsewhere_that_of_the_decoder(direct):
    """Oracle: the loss of forward and of sample.score, called by hand on the same windows."""
    model, x, y = direct[0].float(), direct[1], direct[2]
    rows, apart = M.cache_gap(model, x, y, MAX_DEPTH, 3)
    assert apart < 1e-4
    assert [row["max_depth"] for row in rows if row["rule"] == "uniform"] == [1, 2, 3, 4, 5, 6]          # to twice the training mean
    assert [(row["rule"], row["eps"]) for row in rows[6:]] == list(M.HALTING)
    assert abs(rows[0]["gap"]) < 1e-6 and any(abs(row["gap"]) > 1e-5 for row in rows)
    with torch.no_grad():
        for row in rows:
            rule = None if row["rule"] == "uniform" else row["rule"]
            loss, depth = score(model, x, y, rule, row["eps"], row["max_depth"], slots=5)
            idx = torch.from_numpy(x)
            logits, depths = model.forward_halting(idx, rule, row["eps"], 3, "freeze") if rule else (
                model(idx, n_loops=row["max_depth"])[0], torch.full_like(idx, row["max_depth"]))
            parallel = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten()).item()
            assert row["cached_loss"] == pytest.approx(loss.mean(), abs=1e-5) and row["cached_mean_depth"] == pytest.approx(depth.mean(), abs=0.01)
            assert row["loss"] == pytest.approx(parallel, abs=1e-5) and row["mean_depth"] == pytest.approx(depths.double().mean().item(), abs=0.01)
            assert row["gap"] == pytest.approx(row["cached_loss"] - row["loss"], abs=1e-6)


def spoil(model, name, value):
    model.get_parameter(name).view(-1)[5] = value


def test_every_mistake_is_one_line_and_exit_code_2(folder, tmp_path, monkeypatch, capsys):
    """Oracle: the exit code, and words that the line must hold. In this process, which shows any other exception."""
    corpus, ckpt = Corpus(folder / "data"), folder / "ckpt.pt"
    whole = ckpt.read_bytes()
    for name, content in (("empty.pt", b""), ("garbled.pt", b"nonsense" * 100), ("cut.pt", whole[:len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
    torch.save({"some": "other"}, tmp_path / "foreign.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"config": Path("runs code")}, tmp_path / "code.pt")
    save(tmp_path / "key.pt", corpus, config={"n_embd": 32, "colour": "red"})
    save(tmp_path / "shape.pt", corpus, config=asdict(LoopConfig()) | {"n_embd": 36})
    save(tmp_path / "settings.pt", corpus, settings={})
    save(tmp_path / "nan.pt", corpus, lambda model: spoil(model, "adapter.weight", float("nan")))
    save(tmp_path / "logits.pt", corpus, lambda model: model.norm.weight.mul_(3e38))
    save(tmp_path / "zero.pt", corpus, lambda model: model.core_blocks[0].norm4.weight.zero_())
    other = write_corpus(tmp_path / "other", "gpt2", 50257, 50256)
    mistakes = [([f"--ckpt={tmp_path / name}.pt"], "not a whole checkpoint") for name in
                ("empty", "garbled", "cut", "foreign", "list", "code", "key", "shape", "settings")]
    mistakes += [([f"--ckpt={tmp_path}/none.pt"], "no checkpoint at"), ([f"--ckpt={tmp_path}"], "is not a file"),
                 ([f"--ckpt={tmp_path}/nan.pt"], "adapter.weight"), ([f"--ckpt={tmp_path}/logits.pt"], "logits are not finite at loop 1"),
                 ([f"--ckpt={tmp_path}/zero.pt"], "sequence 0, position 0"), ([f"--data={tmp_path}/nowhere"], "nowhere"),
                 ([f"--data={other.folder}"], "--tokenizer=byte"), (["--block_size=33"], "context of 32"), (["--tokens=31"], "at least 32"),
                 (["--tokens=0"], "tokens"), (["--max_depth=1"], "max_depth"), (["--batch_size=0"], "batch_size"),
                 (["--device=toaster"], "toaster"), (["--dtype=bfloat16"], "dtype"), (["--max_depht=3"], "max_depth")]
    for args, words in mistakes:
        monkeypatch.setattr(sys, "argv", ["measure.py", f"--ckpt={ckpt}", "--tokens=64", "--max_depth=3", *args])
        with pytest.raises(SystemExit) as stop:
            M.main()
        line = capsys.readouterr().err
        assert stop.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and words in line, (args, line)
    assert not list(tmp_path.glob("measure*"))


def test_an_output_that_cannot_be_written_is_refused_before_the_work(folder, tmp_path, monkeypatch, capsys):
    """Oracle: one line that names the file; the work itself is replaced by a failure."""
    import allocate
    (tmp_path / "ckpt.pt").write_bytes((folder / "ckpt.pt").read_bytes())
    for script, work in ((M, "measure"), (allocate, "record")):
        name = f"{script.__name__}.json"
        (tmp_path / name).mkdir()
        monkeypatch.setattr(script, work, None)
        monkeypatch.setattr(sys, "argv", [script.__name__, f"--ckpt={tmp_path}/ckpt.pt", "--tokens=128"])
        with pytest.raises(SystemExit) as stop:
            script.main()
        line = capsys.readouterr().err
        assert stop.value.code == 2 and name in line and line.count("\n") == 1


def test_a_mistake_on_the_command_line_shows_no_traceback(folder, tmp_path):
    """Oracle: what a user sees of the real command."""
    done = run(f"--ckpt={tmp_path}/none.pt")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
