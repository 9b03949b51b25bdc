"""sample.py against a naive decoder without a cache, `forward`, and itself in other company, on tiny random models."""

import copy
import html
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sample as S
from test_measure import save, write_corpus
from test_model import RULES, late_counts, make, naive_freeze, spread_eps, tokens      # noqa: F401  (one is a fixture)

ROOT = Path(__file__).resolve().parent.parent
CONTEXT, VOCAB, MAX_LOOPS = 24, 97, 6
UNIFORM = None


def threshold(model, rule):
    return 0.0 if rule is UNIFORM else spread_eps(model, tokens(3, 16), rule)


def texts_of(prompts, left, seed=0):
    return S.make_texts(prompts, 1, left, seed, 0)


def run(model, texts, rule, eps, slots=1, wait=0.0, choose=None, stop=None):
    """-> the texts, decoded to their ends, in the order of their index."""
    decoder = S.Decoder(model, slots, rule, eps, MAX_LOOPS, wait)
    for _ in S.decode(decoder, texts, choose or S.sampler(0, 0), stop):
        pass
    return sorted(texts, key=lambda text: text.index)


@pytest.mark.parametrize("prompt", [0, 1, 2, 9, CONTEXT - 1])
@pytest.mark.parametrize("rule", [UNIFORM, *RULES])
def test_cached_decoding_equals_a_naive_decoder_without_a_cache(rule, prompt):
    """Oracle: naive_freeze in float64, which computes everything anew; the prompt together, then one token after the other."""
    model = make(seed=prompt)
    eps, logits_of = threshold(model, rule), []

    def choose(logits, texts):
        logits_of.append(logits[0])
        return logits.argmax(-1).tolist()

    text, = run(model, texts_of([tokens(1, prompt, seed=5)[0].tolist()], CONTEXT - prompt), rule, eps, choose=choose)
    assert len(text.ids) == CONTEXT + 1
    expected, depth = naive_freeze(copy.deepcopy(model).double(), torch.tensor(text.ids[:-1]), rule or "state", eps, MAX_LOOPS, prompt)
    assert text.depths == depth.tolist()
    for logits, want in zip(logits_of, expected[prompt:], strict=True):
        assert torch.allclose(logits.double(), want, atol=1e-4)
    assert text.ids[prompt + 1:] == expected[prompt:].argmax(-1).tolist()
    if rule and prompt < 9:
        assert len(set(text.depths)) > 1                   # else nothing was tried


@pytest.mark.parametrize("rule", [UNIFORM, *RULES])
def test_a_text_does_not_depend_on_its_company(rule):
    """
    Oracle: the same prompt alone in one slot. Ragged prompts from empty to beyond the context, texts that slide or end early,
    any number of slots, any order, any wait, greedy and sampled; more prompts than slots.
    """
    model, rng = make(seed=3), random.Random(f"company {rule}")
    eps, stop = threshold(model, rule), 11
    for trial in range(4):
        lengths = [0, *rng.sample((1, 2, 5, 17, CONTEXT - 2, CONTEXT - 1, CONTEXT + 7), 6)]       # all different: equal prompts share a draw
        prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
        choose = S.sampler(*((0, 0), (0.7, 5), (1.5, 0))[trial % 3])
        alone = [run(model, texts_of([prompt], 14, seed=trial), rule, eps, choose=choose, stop=stop)[0] for prompt in prompts]
        for slots, wait in rng.sample(list(itertools.product((1, 2, 3, 7), (0, 0.5, 0.75, 1))), 3):
            order = rng.sample(range(7), 7)
            together = run(model, texts_of([prompts[i] for i in order], 14, seed=trial), rule, eps, slots, wait, choose, stop)
            for i, text in zip(order, together):
                assert (text.ids, text.depths) == (alone[i].ids, alone[i].depths), (trial, slots, wait, i)


@pytest.mark.parametrize("slots, wait", [(1, 0), (4, 0), (4, 0.5), (4, 1), (16, 0.75)])
@pytest.mark.parametrize("rule", [UNIFORM, *RULES])
def test_decoding_by_the_captured_loop_step_writes_the_same(rule, slots, wait, late_counts):
    """Oracle: the decoder without it; also with more slots than texts, and where its counts come one loop late."""
    model, found = make(), []
    for captured in (False, True):
        texts = texts_of([list(range(n, 2 * n)) for n in (1, 0, 5, 9, 23, 30, 2)], 12)
        decoder = S.Decoder(model, slots, None if rule == UNIFORM else rule, 0.0 if rule == UNIFORM else threshold(model, rule), 6, wait,
                            captured=captured)
        for _ in S.decode(decoder, texts, S.sampler(0, 0)):
            pass
        found.append([(text.ids, text.depths) for text in texts])
    assert found[0] == found[1]


def test_texts_end_early_and_others_take_their_slots():
    """Oracle: counting. The id `stop` ends a text; a queue longer than the slots is worked off in order."""
    model = make(seed=3)
    free = run(model, texts_of([[i] for i in range(9)], 12), "state", threshold(model, "state"))
    stop = free[4].ids[5]                                  # an id that some text is known to draw
    texts = texts_of([[i] for i in range(9)], 12)
    begun = []
    decoder = S.Decoder(model, 2, "state", threshold(model, "state"), MAX_LOOPS)
    for text, id, depth in S.decode(decoder, texts, S.sampler(0, 0), stop):
        begun += [text.index] * (text.index not in begun)
        assert text.ids[-1] == id and text.depths[-1] == depth
    assert begun == list(range(9))
    for text, whole in zip(texts, free):
        added = whole.ids[2:]
        assert text.ids[2:] == (added[:added.index(stop) + 1] if stop in added else added)
        assert text.added == len(text.ids) - 2 and len(text.depths) == len(text.ids) - 1
    assert any(len(text.ids) < 14 for text in texts)


def test_nothing_is_added_to_a_text_that_may_not_grow():
    assert list(S.decode(S.Decoder(make(), 2, "state", 0.1, 3), texts_of([[1], [2]], 0), S.sampler(0, 0))) == []


@pytest.mark.parametrize("r", [1, 2, 5])
def test_with_a_cache_for_each_loop_uniform_decoding_equals_forward(r):
    """Oracle: LoopLM.forward, all tokens at once. The cache of the last loop is the same at depth 1 and differs beyond."""
    model, x = make(seed=1), tokens(5, CONTEXT)
    y = x.roll(-1, 1)
    with torch.no_grad():
        expected = F.cross_entropy(model(x, n_loops=r)[0].flatten(0, 1), y.flatten(), reduction="none").view_as(x).numpy()
    loss, depth = S.score(model, x.numpy(), y.numpy(), UNIFORM, 0.0, r, slots=3, copies=r)
    assert np.abs(loss - expected).max() < 1e-5 and (depth == r).all()
    loss, _ = S.score(model, x.numpy(), y.numpy(), UNIFORM, 0.0, r, slots=3)
    assert (np.abs(loss - expected).max() < 1e-5) == (r == 1)


@pytest.mark.parametrize("rule", RULES)
def test_score_is_the_loss_of_decoding_the_same_text(rule):
    """Oracle: the naive decoder, from the first token on."""
    model, x = make(seed=2), tokens(3, 12)
    eps, y = threshold(model, rule), tokens(3, 12, seed=9)
    loss, depth = S.score(model, x.numpy(), y.numpy(), rule, eps, MAX_LOOPS, slots=2)
    for i in range(3):
        logits, depths = naive_freeze(copy.deepcopy(model).double(), x[i], rule, eps, MAX_LOOPS, 0)
        assert np.allclose(loss[i], F.cross_entropy(logits, y[i], reduction="none").numpy(), atol=1e-4)
        assert depth[i].tolist() == depths.tolist()


@pytest.mark.parametrize("max_loops", [1, 4, 64])
def test_the_cache_is_that_of_a_plain_transformer_whatever_the_depth(max_loops):
    """Oracle: 2 * blocks * slots * key/value heads * context * head width, with n_prelude + n_core + n_coda blocks."""
    model, slots = make(n_prelude=1, n_core=2, n_coda=1), 3
    decoder = S.Decoder(model, slots, "state", 0.0, max_loops)

    def held():
        """Elements of all tensors that a decoder has, each storage once."""
        found, todo, seen = {}, [decoder], set()
        while todo:
            thing = todo.pop()
            if id(thing) in seen or thing is model:
                continue
            seen.add(id(thing))
            if isinstance(thing, torch.Tensor):
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes() // thing.element_size()
            elif isinstance(thing, dict):
                todo += thing.values()
            elif isinstance(thing, (list, tuple)):
                todo += thing
            elif hasattr(thing, "__dict__"):
                todo += vars(thing).values()
        return sum(found.values())

    cache = 2 * (1 + 2 + 1) * slots * 2 * CONTEXT * 8
    before = held()
    assert cache <= before <= cache + 2 * slots * 32 + 2 * CONTEXT * 8         # and a state and an injection per slot, the angles
    for _ in S.decode(decoder, texts_of([[1, 2, 3]] * 5, 10), S.sampler(0, 0)):
        assert held() <= before + 3 * slots                # where the tokens of the last call stood


def test_a_text_beyond_the_context_goes_on_from_its_last_half_as_a_new_prompt():
    """Oracle: a fresh text whose prompt is that half."""
    model, prompt = make(seed=4), tokens(1, 20)[0].tolist()
    eps = threshold(model, "state")
    text, = run(model, texts_of([prompt], 10), "state", eps)                   # 21 + 3 fill the context, then 7 more
    at = 21 + CONTEXT - 21 + 1                             # ids when position CONTEXT - 1 has been read out
    half = S.Text(text.ids[at - CONTEXT // 2:at], len(text.ids) - at)
    run(model, [half], "state", eps)
    assert half.ids[CONTEXT // 2:] == text.ids[at:] and len(text.ids) == 31
    long = run(model, texts_of([tokens(1, 60)[0].tolist()], 5), "state", eps)[0]
    half = run(model, [S.Text(tokens(1, 60)[0].tolist()[-CONTEXT // 2:], 5)], "state", eps)[0]
    assert long.ids[-5:] == half.ids[-5:]
    assert long.depths[:61 - CONTEXT // 2] == [0] * (61 - CONTEXT // 2) and all(long.depths[61 - CONTEXT // 2:])


@pytest.mark.parametrize("wait", [0, 0.5, 1])
def test_wait_decides_how_many_share_a_readout(wait):
    """Oracle: its definition, checked at every readout; at 1 nobody runs, at 0 everybody has only just halted."""
    model, calls = make(seed=5), []
    decoder = S.Decoder(model, 6, "state", threshold(model, "state"), MAX_LOOPS, wait)

    def choose(logits, texts):
        waiting, running = len(texts), len(decoder.running)
        calls.append((waiting, running))
        return logits.argmax(-1).tolist()

    for _ in S.decode(decoder, texts_of([[i] for i in range(6)], 10), choose):
        pass
    assert all(waiting >= wait * (waiting + running) for waiting, running in calls)
    assert any(running for _, running in calls) == (wait < 1)


def test_samples_follow_the_softmax_and_only_the_top_k():
    """Oracle: expected counts of 20,000 draws from ten ids; ids of probability zero and beyond top_k never come."""
    logits = torch.tensor([2.0, -torch.inf, 0.5, 1.0, -1.0, 0.0, 1.5, -torch.inf, 0.2, -0.3])
    for temperature, top_k in ((1.0, 0), (0.5, 3), (2.0, 100)):
        texts = [S.Text([0], 1, random.Random(i)) for i in range(20_000)]
        counts = np.bincount(S.sampler(temperature, top_k)(logits.expand(20_000, -1), texts), minlength=10)
        kept = logits.clone()
        if top_k == 3:
            kept[logits < 1.0] = -torch.inf
        p = (kept / temperature).softmax(0).numpy()
        assert (counts[p == 0] == 0).all() and len(counts) == 10
        assert (np.abs(counts - 20_000 * p) < 5 * np.sqrt(20_000 * p * (1 - p)) + 1e-9).all()
    assert S.sampler(0, 3)(logits[None], texts[:1]) == [0]


def test_the_last_id_is_drawn_at_the_very_end_and_none_beyond_it():
    """Random numbers next to 0 and 1 stay inside the vocabulary."""
    class Fixed:
        def __init__(self, value):
            self.random = lambda: value

    logits = torch.tensor([[-torch.inf, 0.0, 3.0, -torch.inf]] * 2)
    assert S.sampler(1.0, 0)(logits, [S.Text([0], 1, Fixed(0.0)), S.Text([0], 1, Fixed(1 - 2**-53))]) == [1, 2]


def test_equal_prompts_draw_differently_and_reproducibly():
    def ids(seed):
        return [text.ids for text in run(make(seed=6), S.make_texts([[1, 2]], 4, 8, seed, 0), "state", 0.1, 2, choose=S.sampler(1.0, 0))]

    assert ids(0) == ids(0) != ids(1) and len(set(map(tuple, ids(0)))) == 4


def test_pieces_complete_characters_and_hide_escape_sequences():
    """Oracle: bytes.decode; what could steer a terminal is replaced."""
    pieces = [bytes([i]) for i in range(256)] + [b""]
    for text in ("plain\tand\nlines", "ein Käse für 3\u00a0€, 漢字\u3000🙂👩\u200d🚀"):
        piece = S.Pieces(pieces)
        assert "".join(map(piece, text.encode())) == text
    piece = S.Pieces(pieces)
    assert "".join(map(piece, b"\xe2\x82a\x1b[31m\x07\r" + "\u202e\x9b".encode())) == "�a�[31m����"
    piece = S.Pieces(pieces)
    assert piece(0xe2) == "" and piece(256, final=True) == "�"


def test_the_page_escapes_what_the_model_says():
    """Oracle: the page without its tags, unescaped, is the text; nothing but our own tags is left in it."""
    said = '<script>alert("x")</script> & <b>'
    text = S.Text([256, *said.encode(), 256], 0, depths=[1 + i % 4 for i in range(len(said) + 1)], added=9)
    page = S.page([text], [bytes([i]) for i in range(256)] + [b""], 256, "<i>about</i>")
    body = re.search("<pre>(.*)</pre>", page, re.DOTALL)[1]
    assert html.unescape(re.sub("<.*?>", "", body)) == said + "⏹"
    assert set(re.findall("<(/?[a-z0-9!]+)", page, re.IGNORECASE)) == {
        "!DOCTYPE", "html", "head", "/head", "meta", "title", "/title", "style", "/style", "body", "/body", "/html", "p", "/p",
        "pre", "/pre", "span", "/span"}
    assert "src=" not in page and "href=" not in page and page.count("class=prompt") == len(text.ids) - 1 - 9
    for most in (1, 2, 5, 8, 32):
        places = [S.PALETTE.index(S.color(d, most)) for d in range(1, most + 1)]
        assert places == sorted(places) and places[0] == 0 and len(set(places)) == min(most, len(S.PALETTE))


# ---------------------------------------------------------------------------------------------------------
# the command

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    save(folder / "ckpt.pt", write_corpus(folder / "data"))
    return folder


def command(*args):
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *map(str, args)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_command_writes_text_depths_and_a_page(folder):
    (folder / "lines.txt").write_text("one\ntwo\nthree, which is longer than the context of thirty-two bytes\n")
    args = (f"--ckpt={folder / 'ckpt.pt'}", "--prompt", "import os", f"--prompt=LINES:{folder / 'lines.txt'}", "--max_new_tokens=9",
            "--slots=2", "--eps=0.3", f"--html={folder / 'depth.html'}")
    first, second = command(*args), command(*args, "--show_depth", "--compare")
    assert first.returncode == 0 and first.stderr == "", first.stderr
    out = dict(re.findall(r"^(\w+): (.+)$", first.stdout, re.MULTILINE))
    assert out["texts"] == "4" and int(out["tokens"]) <= 36 and 1 <= float(out["mean_depth"]) <= 3
    assert "its last 16 are read" in first.stdout and "import os" in first.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", second.stdout)
    assert "\x1b[38;2;" in second.stdout and "speedup_over_uniform_3: " in plain
    texts = [part.split("\n" + 40 * "-") for part in (first.stdout, plain)]
    assert texts[0][0].split("\n", 2)[2] == texts[1][0].split("\n", 2)[2] and texts[0][1:4] == texts[1][1:4]
    assert (folder / "depth.html").read_text().count("<pre>") == 4
    other = command(f"--ckpt={folder / 'ckpt.pt'}", "--prompt=import os", "--max_new_tokens=9", "--slots=5", "--eps=0.3", "--wait=0")
    assert other.stdout.split("\n", 2)[2].split("\n" + 40 * "-")[0] in first.stdout    # the same text, alone


def test_the_threshold_is_the_one_that_allocate_found_for_this_checkpoint(folder, tmp_path):
    s, ckpt = S.Settings(ckpt=str(tmp_path / "ckpt.pt")), {"step": 7, "config": {"n_embd": 3}, "data": {"name": "x"}}
    assert "a guess" in S.threshold(s, ckpt, 8)[1]
    found = {"decode": {"state": {"threshold": 0.25}}, "meta": {"step": 7, "config": {"n_embd": 3}, "trained_on": {"name": "x"}, "max_loops": 8}}
    (tmp_path / "allocate.json").write_text(json.dumps(found))
    assert S.threshold(s, ckpt, 8) == (0.25, f"{tmp_path / 'allocate.json'} chose it")
    for other, max_loops in ((ckpt | {"step": 8}, 8), (ckpt | {"config": {"n_embd": 4}}, 8), (ckpt | {"data": {}}, 8), (ckpt, 9)):
        assert "a guess" in S.threshold(s, other, max_loops)[1]
    assert "a guess" in S.threshold(S.Settings(ckpt=s.ckpt, rule="kl"), ckpt, 8)[1]
    assert S.threshold(S.Settings(ckpt=s.ckpt, eps=0.5), ckpt, 8)[0] == 0.5
    (tmp_path / "allocate.json").write_text("[1]")
    assert "a guess" in S.threshold(s, ckpt, 8)[1]


def test_prompts_are_texts_whole_files_or_lines(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("one\x0cstill one\n\ntwo\u2028 still\n", encoding="utf-8")
    read = lambda *values: [bytes(ids).decode() for ids in S.read_prompts(values, "byte")]           # noqa: E731
    assert read(f"LINES:{path}", "", "FILE") == ["one\x0cstill one", "", "two\u2028 still", "", "FILE"]
    assert read(f"FILE:{path}") == [path.read_text(encoding="utf-8")]
    path.write_text("")
    assert read(f"FILE:{path}") == [""]
    with pytest.raises(SystemExit):
        read(f"LINES:{path}")


def test_uniform_depth_bfloat16_and_a_configuration_file(folder, tmp_path):
    (tmp_path / "settings.py").write_text('prompt = "import os"\nmax_new_tokens = 5\nuniform = 2\ndtype = "bfloat16"\n')
    done = command(f"--ckpt={folder / 'ckpt.pt'}", tmp_path / "settings.py")
    assert done.returncode == 0, done.stderr
    assert "import os" in done.stdout and "mean_depth: 2.000" in done.stdout and "tokens: 5" in done.stdout


MISTAKES = {"--ckpt=nowhere.pt": "no checkpoint at nowhere.pt", "--temperature=-1": "temperature must lie", "--top_k=1.5": "top_k",
            "--slots=0": "slots must lie", "--wait=2": "wait must lie", "--eps=nan": "must be a number, not 'nan'", "--rule=KL": "rule must be",
            "--prompt=FILE:nowhere.txt": "cannot read the prompt file 'nowhere.txt'", "--promt=a": "the nearest is 'prompt'",
            "--max_new_tokens=-3": "max_new_tokens must lie", "--html=nowhere/x.html": "cannot write nowhere/x.html",
            "--device=tpu": "no device 'tpu'", "--dtype=float16": "dtype must be",
            "--dtype=bfloat16 --rule=kl --eps=0.0005": "in bfloat16 two readouts"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder, mistake, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--ckpt={folder / 'ckpt.pt'}", *mistake.split()])
    with pytest.raises(SystemExit) as exit:
        S.main()
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.count("\n") == 1 and MISTAKES[mistake] in err, err
