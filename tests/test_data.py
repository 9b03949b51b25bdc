"""Shards, the corpus and prepare_data.py: on the CPU, without a network."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from prepare_data import Corpus, encode, read_shard, token_bytes

SCRIPT = Path(prepare_data.__file__)
TEXTS = [f"Document {i}: " + "naïve café, 東京 🙂\n\tx  =  y;  <|endoftext|> " * (i % 7) + f"\n\n{i ** 9}"
         for i in range(150)]


@pytest.fixture(autouse=True, scope="module")
def hub(tmp_path_factory):
    """No test reaches the network, or leaves anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture
def prepare(monkeypatch, tmp_path):
    """prepare(source, key=value, ...) runs the script in this process -> the folder it wrote."""
    def run(*sources, **settings):
        settings = {"out": tmp_path / f"out{len(list(tmp_path.glob('out*')))}", **settings}
        options = [f"--{key}={value}" for key, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, sources), *options])
        prepare_data.main()
        return settings["out"]
    return run


@pytest.fixture
def refused(prepare, capsys):
    """refused(...) as prepare(...), which must end with exit code 2 and one line on stderr -> that line."""
    def run(*sources, **settings):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            prepare(*sources, **settings)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert exit.value.code == 2 and len(lines) == 1
        return lines[0]
    return run


def command(*args, **options):
    return subprocess.Popen([sys.executable, SCRIPT, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **options)


def write_files(folder, texts=TEXTS):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:04d}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens(folder, split):
    corpus = Corpus(folder)
    return np.concatenate([read_shard(path) for path, *_ in corpus.shards[split]])


def documents(folder, split):
    """The token arrays between one end of text and the next."""
    ids, eot = tokens(folder, split), Corpus(folder).eot
    assert ids[0] == eot
    return [part[1:] for part in np.split(ids, np.flatnonzero(ids == eot)[1:])]


def write_corpus(folder, train, val=((0, 1, 2, 3),), header=True):
    """A folder of shards without meta.json, as others write them."""
    folder.mkdir(exist_ok=True)
    for split, shards in (("train", train), ("val", val)):
        for i, ids in enumerate(shards):
            head = np.zeros(256, "<i4")
            head[:3] = 20240520, 1, len(ids)
            (folder / f"x_{split}_{i:06d}.bin").write_bytes(head.tobytes() * header + np.array(ids, "<u2").tobytes())
    return folder


# ---------------------------------------------------------------------------------------------------------
# preparing

def test_gpt2_shards_decode_to_the_text_and_equal_tiktoken(gpt2_files, prepare, tmp_path):
    """Oracle: tiktoken's encode_ordinary of each whole document, and the documents themselves."""
    import tiktoken
    gpt2 = tiktoken.get_encoding("gpt2")
    out = prepare(write_files(tmp_path / "texts"), shard_tokens=500, num_proc=1, val_fraction=0.2)
    found = documents(out, "train") + documents(out, "val")
    assert sorted(map(list, found)) == sorted(gpt2.encode_ordinary(text) for text in TEXTS)
    assert sorted(gpt2.decode(ids.tolist()) for ids in found) == sorted(TEXTS)
    pieces = token_bytes("gpt2")
    assert len(pieces) == 50257 and pieces[50256] == b""
    assert b"".join(pieces[i] for i in encode("gpt2", TEXTS[6])) == TEXTS[6].encode()


def test_the_bytes_do_not_depend_on_the_number_of_processes(gpt2_files, prepare, tmp_path):
    """Oracle: the folder that one process writes."""
    texts = write_files(tmp_path / "texts")
    one, two = (prepare(texts, shard_tokens=3000, num_proc=n, val_fraction=0.2) for n in (1, 2))
    assert len(contents(one)) > 4
    assert contents(one) == contents(two)


def test_validation_documents_do_not_depend_on_shard_size_and_are_not_in_training(prepare, tmp_path):
    """Oracle: the documents of another shard size, as sets; duplicates fall to one side together."""
    texts = write_files(tmp_path / "texts", TEXTS + TEXTS[::3])
    large, small = (prepare(texts, tokenizer="byte", shard_tokens=n, val_fraction=0.2) for n in (10 ** 6, 777))
    assert len(Corpus(small).shards["train"]) > 10 > len(Corpus(large).shards["train"])
    for split in ("train", "val"):
        assert np.array_equal(tokens(large, split), tokens(small, split))
        assert all(n == 777 for *_, n in Corpus(small).shards[split][:-1])
    train, val = ({bytes(ids.astype(np.uint8)) for ids in documents(small, split)} for split in ("train", "val"))
    assert not train & val and train | val == {text.encode() for text in TEXTS}
    assert len(documents(small, "train")) + len(documents(small, "val")) == len(TEXTS) + len(TEXTS[::3])


def test_the_standard_library_is_prepared_as_its_own_bytes(prepare, capsys):
    """Oracle: the source of a module that we import; a second run changes nothing."""
    out = prepare()
    before, text = contents(out), Path(json.__file__).read_bytes()
    assert any(ids.astype(np.uint8).tobytes() == text for ids in documents(out, "train") + documents(out, "val"))
    corpus = Corpus(out)
    assert (corpus.name, corpus.tokenizer, corpus.vocab_size, corpus.eot) == ("stdlib", "byte", 257, 256)
    assert 0.01 < corpus.meta["splits"]["val"]["tokens"] / corpus.meta["splits"]["train"]["tokens"] < 0.1
    prepare(out=out)
    assert "prepared already" in capsys.readouterr().out and contents(out) == before
    assert contents(prepare()) == before


def test_text_jsonl_parquet_glob_and_folder_hold_the_same_documents(prepare, tmp_path):
    """Oracle: the tokens of the folder of text files."""
    import datasets
    folder = write_files(tmp_path / "texts")
    table = datasets.Dataset.from_dict({"body": TEXTS, "n": list(range(len(TEXTS)))})
    table.to_json(tmp_path / "rows.jsonl", force_ascii=False)
    table.to_parquet(tmp_path / "rows.parquet")
    (folder / "picture.png").write_bytes(b"\x89")
    options = dict(tokenizer="byte", val_fraction=0.2)
    outs = [prepare(folder, **options), prepare(f"{folder}/**/*.txt", **options),
            prepare(tmp_path / "rows.jsonl", column="body", **options),
            prepare(tmp_path / "rows.parquet", column="body", **options)]
    for split in ("train", "val"):
        assert all(np.array_equal(tokens(out, split), tokens(outs[0], split)) for out in outs)
    assert [Corpus(out).name for out in outs] == ["texts", "texts", "rows", "rows"]


def test_named_sources_take_the_local_path_s_way(gpt2_files, prepare, monkeypatch, tmp_path):
    """Oracle: the tokens of the same documents as files, for a stand-in of the hub."""
    import datasets
    asked = []
    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"id": TEXTS, "text": TEXTS})
    local = prepare(write_files(tmp_path / "texts"), num_proc=1, val_fraction=0.2)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fineweb, stories = (prepare(name, num_proc=1, val_fraction=0.2) for name in ("fineweb-edu", "tinystories"))
    assert asked == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train"}),
                     (("roneneldan/TinyStories", None), {"split": "train"})]
    for split in ("train", "val"):
        assert np.array_equal(tokens(fineweb, split), tokens(local, split))
        assert np.array_equal(tokens(stories, split), tokens(local, split))


def test_shards_of_a_hub_repository_are_used_as_they_are(prepare, refused, monkeypatch, tmp_path):
    """Oracle: the files of a stand-in of the hub's cache."""
    import huggingface_hub
    cache = write_corpus(tmp_path / "cache", [[50256, 1, 2, 3], [4, 5]])
    (cache / "notes.bin").write_bytes(b"not a shard")
    def snapshot_download(repository, repo_type, allow_patterns):
        assert (repository, repo_type, allow_patterns) == ("somebody/some-shards", "dataset", "*.bin")
        return str(cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    out = prepare("hf://somebody/some-shards")
    assert np.array_equal(tokens(out, "train"), [50256, 1, 2, 3, 4, 5])
    assert Corpus(out).meta["splits"]["train"]["documents"] == 1
    assert {name: data for name, data in contents(out).items() if name != "meta.json"} == \
           {name: data for name, data in contents(cache).items() if name != "notes.bin"}
    write_corpus(cache, [[1, 60000, 2]])
    assert "x_train_000000.bin holds the id 60000" in refused("somebody/some-shards")
    write_corpus(cache, [[1, 2]])
    (cache / "x_val_000000.bin").unlink()
    assert "no val shards" in refused("somebody/some-shards")


# ---------------------------------------------------------------------------------------------------------
# faults

def test_a_killed_run_leaves_nothing_and_a_rerun_the_same_bytes(prepare, tmp_path):
    """SIGKILL when so many shards are there. Oracle: the folder of a run that nobody killed."""
    options = {"shard_tokens": 100_000}
    whole, out = contents(prepare(**options)), tmp_path / "killed"
    for shards in (0, 1, 30, 90):
        process = command(f"--out={out}", "--shard_tokens=100_000")
        while len(list(tmp_path.glob(".killed.building/*.bin"))) < shards or not list(tmp_path.glob(".killed.building")):
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL and not out.exists()
    assert contents(prepare(out=out, **options)) == whole
    assert not list(tmp_path.glob(".killed.building"))


def test_processes_do_not_outlive_a_killed_parent(gpt2_files, tmp_path):
    """Oracle: their pipe to us closes, which it does when the last of them has gone."""
    process = command("stdlib", "--tokenizer=gpt2", "--num_proc=2", f"--out={tmp_path / 'out'}")
    while not list(tmp_path.glob(".out.building/*.bin")):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.communicate(timeout=20)


def test_two_at_once_do_not_meet(prepare, tmp_path):
    """Oracle: the folder of one alone; the other waits its turn or is refused in one line."""
    whole, out = contents(prepare(shard_tokens=100_000)), tmp_path / "both"
    processes = [command(f"--out={out}", "--shard_tokens=100_000") for _ in range(2)]
    for process in processes:
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 0 or process.returncode == 2 and "another process" in error
    assert 0 in [process.returncode for process in processes]
    assert contents(out) == whole


def test_a_disk_that_takes_no_more_is_one_line(tmp_path):
    """A limit on the size of a file stands in for the full disk."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, 2 ** 20))
    process = command(f"--out={tmp_path / 'out'}", preexec_fn=limit)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "error: cannot write" in error and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == [".out.building.lock"]


@pytest.mark.parametrize("source", ["fineweb-edu", "tinystories", "somebody/some-shards", "hf://somebody/some-shards"])
def test_without_a_network_the_hub_is_one_line(gpt2_files, refused, source):
    """HF_HUB_OFFLINE=1 stands in for the cut cable."""
    assert "HF_ENDPOINT" in refused(source)


def test_without_a_network_gpt2_is_one_line(refused, monkeypatch, tmp_path):
    """Nothing in tiktoken's cache, and its HTTP library raises."""
    import requests
    def get(*args, **kwargs):
        raise requests.ConnectionError("no route to host\nsecond line")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", get)
    prepare_data.gpt2.cache_clear()
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    assert "TIKTOKEN_CACHE_DIR" in refused("stdlib", tokenizer="gpt2")


def test_each_bad_input_is_one_line(refused, tmp_path):
    """Exit code 2, one line that names what is wrong."""
    few, many = write_files(tmp_path / "few", TEXTS[:2]), write_files(tmp_path / "many")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "n": 1, "l": ["a"], "d": {"text": "a"}}\n' * 50)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"\n{{{\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    shutil.copytree(many, tmp_path / "mixed")
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "mixed")
    (tmp_path / "file").write_text("")
    byte = {"tokenizer": "byte"}
    assert "too few documents" in refused(few, **byte)
    assert "too few documents: none fell to the val" in refused(many, val_fraction=1e-9, **byte)
    assert "holds no text" in refused(tmp_path / "blank.txt", **byte)
    assert "no file" in refused(tmp_path / "empty", **byte)
    assert "no file" in refused(tmp_path / "missing.txt", **byte)
    assert "missing.py is no path here" in refused("texts/missing.py", **byte)
    assert "should be UTF-8" in refused(tmp_path / "latin.txt", **byte)
    assert "should be json" in refused(tmp_path / "broken.jsonl", **byte)
    assert "should be parquet" in refused(tmp_path / "broken.parquet", **byte)
    assert "no column 'body', only text, n, l, d" in refused(tmp_path / "rows.jsonl", column="body", **byte)
    for column in ("n", "l", "d"):
        assert "not text" in refused(tmp_path / "rows.jsonl", column=column, **byte)
    assert "mixes json and text" in refused(tmp_path / "mixed", **byte)
    assert "quote a glob" in refused("a.txt", "b.txt")
    assert "byte or gpt2" in refused(tokenizer="cl100k_base")
    assert "val_fraction" in refused(val_fraction=1.5)
    assert "val_fraction" in refused(val_fraction="nan")
    assert "shard_tokens" in refused(shard_tokens=2 ** 31)
    assert "nearest is 'tokenizer'" in refused(tokeniser="byte")
    assert "cannot write" in refused(out=tmp_path / "file" / "out")
    assert "no prepared data" in refused(out=many)
    assert "no prepared data" in refused(out=tmp_path / "nowhere", verify=True)


def test_another_preparation_is_not_overwritten(prepare, refused, tmp_path):
    """Oracle: the bytes of the first."""
    out = prepare()
    before = contents(out)
    assert "val_fraction 0.04, not 0.1" in refused(out=out, val_fraction=0.1)
    assert contents(out) == before


def test_verify_finds_a_flipped_byte(prepare, refused, capsys):
    """Oracle: the same folder before the flip, which passes."""
    out = prepare(shard_tokens=1_000_000)
    prepare(out=out, verify=True)
    assert "verified: " in capsys.readouterr().out
    path = sorted(out.glob("*_train_*.bin"))[3]
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    Corpus(out)
    assert f"{path.name} is not what meta.json describes" in refused(out=out, verify=True)


# ---------------------------------------------------------------------------------------------------------
# reading

def test_llm_c_and_nanogpt_files_read_alike(tmp_path):
    """Oracle: the ids that were written, once with and once without the header."""
    ids = np.random.default_rng(0).integers(0, 50257, 5000)
    for header in (True, False):
        folder = write_corpus(tmp_path / f"header_{header}", [ids], [ids[:100]], header)
        if not header:
            (folder / "x_train_000000.bin").rename(folder / "train.bin")
            (folder / "x_val_000000.bin").rename(folder / "val.bin")
        corpus = Corpus(folder)
        assert np.array_equal(tokens(folder, "train"), ids) and np.array_equal(tokens(folder, "val"), ids[:100])
        assert (corpus.tokenizer, corpus.vocab_size) == ("gpt2", 50257)
        x, y = corpus.windows("train", 640, 64)
        assert np.array_equal(x.ravel(), ids[:640]) and np.array_equal(y.ravel(), ids[1:641])


def test_a_batch_is_a_pure_function_and_its_slices_agree(tmp_path):
    """Oracle: the whole batch of another Corpus on the same folder."""
    folder = write_corpus(tmp_path / "c", [np.arange(1000), np.arange(2000, 2500)])
    corpus = Corpus(folder)
    corpus.batch("train", 0, 0, 8, 16)
    x, y = Corpus(folder).batch("train", 7, 3, 8, 16)
    assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == np.int64
    assert np.array_equal(y, x + 1)
    for first, count in ((0, 4), (4, 4), (2, 1), (5, None)):
        a, b = corpus.batch("train", 7, 3, 8, 16, first, count)
        assert np.array_equal(a, x[first:][:count]) and np.array_equal(b, y[first:][:count])
    for seed, step in ((7, 4), (8, 3)):
        assert not np.array_equal(corpus.batch("train", seed, step, 8, 16)[0], x)


def test_windows_never_cross_shards_and_all_are_drawn(tmp_path):
    """Oracle: all windows of shards of uneven size (two too short for any), enumerated."""
    shards = [np.arange(100, 109), np.arange(200, 205), np.arange(300, 306), [400], np.arange(500, 517)]
    corpus = Corpus(write_corpus(tmp_path / "c", shards))
    possible = {tuple(ids[i:i + 6]) for ids in shards for i in range(len(ids) - 5)}
    rows = [tuple(row) for step in range(10) for row in np.column_stack([a[:, -1:] if i else a for i, a in
            enumerate(corpus.batch("train", 0, step, 200, 5))])]
    assert set(rows) == possible
    counts = np.unique(rows, axis=0, return_counts=True)[1]
    assert counts.min() > len(rows) / len(possible) / 2 and counts.max() < len(rows) / len(possible) * 2
    x, y = corpus.windows("train", 10 ** 9, 5)
    assert x[:, 0].tolist() == [100, 300, 500, 505, 510] and np.array_equal(y, x + 1)
    assert corpus.windows("train", 14, 5)[0][:, 0].tolist() == [100, 300]
    assert corpus.windows("train", 1, 5)[0][:, 0].tolist() == [100]


def test_a_split_without_a_window_is_refused(tmp_path):
    """Exactly block_size + 1 tokens are one window."""
    corpus = Corpus(write_corpus(tmp_path / "c", [range(10)], [range(4)]))
    assert corpus.batch("val", 0, 0, 3, 3)[0].tolist() == [[0, 1, 2]] * 3
    for read in (lambda: corpus.batch("val", 0, 0, 3, 4), lambda: corpus.windows("val", 100, 4)):
        with pytest.raises(ValueError, match="val split .* more than 4 tokens.*--block_size"):
            read()


def test_thousands_of_shards_stay_closed(tmp_path):
    """Oracle: the open files of this process before."""
    folder = write_corpus(tmp_path / "c", [[i, i + 1] for i in range(2000)])
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    corpus = Corpus(folder)
    x, y = corpus.batch("train", 0, 0, 500, 1)
    assert np.array_equal(y, x + 1)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def damage(data, at, value):
    data = bytearray(data)
    data[at:at + 4] = np.array([value], "<i4").tobytes()
    return bytes(data)


@pytest.mark.parametrize("change, says", [
    (lambda data: b"", "empty"),
    (lambda data: data[:500], "garbled header"),
    (lambda data: data[:1024], "not whole"),
    (lambda data: data[:-2], "not whole"),
    (lambda data: data[:-1], "not whole"),
    (lambda data: data + b"\0\0", "not whole"),
    (lambda data: damage(data, 0, 20240801), "garbled header"),
    (lambda data: damage(data, 4, 2), "garbled header"),
    (lambda data: damage(data, 8, 0)[:1024], "empty"),
    (lambda data: damage(data, 8, -5), "empty or not whole"),
    (lambda data: damage(data, 8, 2 ** 30), "not whole"),
    (lambda data: damage(data, 1024, 50257), "holds the id 50257"),
    (lambda data: damage(data, 8, 2999)[:-2], "tokens, but meta.json says 3000"),
    (lambda data: data[1024:] + b"\0", "not whole"),
    (None, "cannot read"),
])
def test_a_damaged_shard_is_named(tmp_path, change, says):
    """Each damage raises one line that names the file and what to do, when the folder is opened."""
    folder = write_corpus(tmp_path / "c", [np.arange(3000)] * 2)
    (folder / "meta.json").write_text(json.dumps(Corpus(folder).meta))
    path = folder / "x_train_000001.bin"
    data = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(data))
    with pytest.raises(ValueError, match=f"{path.name}.*{says}|{says}.*{path.name}") as error:
        Corpus(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [
    lambda meta: "", lambda meta: "{", lambda meta: "[]", lambda meta: "3", lambda meta: "[" * 100_000,
    lambda meta: meta.replace("gpt2", "other"), lambda meta: meta.replace("50257", "5"),
    lambda meta: meta.replace("splits", "x"),
    lambda meta: meta.replace("x_train", "../c/x_train"), lambda meta: meta.replace("x_train_000000.bin", "/etc/train.bin"),
    lambda meta: meta.replace('"tokenizer": "gpt2"', '"tokenizer": []'),
    lambda meta: meta.replace('"x_val_000000.bin"', "7"), lambda meta: "\udcff",
])
def test_a_garbled_meta_json_is_refused(tmp_path, change):
    """Names of shards that leave the folder count as garbled, too."""
    folder = write_corpus(tmp_path / "c", [np.arange(3000)])
    meta = json.dumps(Corpus(folder).meta)
    assert change(meta) != meta
    (folder / "meta.json").write_text(change(meta), errors="surrogateescape")
    with pytest.raises(ValueError, match="meta.json is garbled: .*prepare_data.py"):
        Corpus(folder)


def test_byte_tokens_are_the_bytes():
    """Oracle: str.encode."""
    text = "naïve\0 <|endoftext|> 東京\r\n"
    assert encode("byte", text).tolist() == list(text.encode()) and encode("byte", text).dtype == np.uint16
    assert b"".join(token_bytes("byte")[i] for i in encode("byte", text)) == text.encode()
    assert len(token_bytes("byte")) == 257 and token_bytes("byte")[256] == b""
