"""
Text to shards of tokens, and shards to batches.

    python prepare_data.py                      # Python's own standard library, as bytes: no download
    python prepare_data.py tinystories          # roneneldan/TinyStories, GPT-2 BPE
    python prepare_data.py fineweb-edu          # HuggingFaceFW/fineweb-edu, sample-10BT, GPT-2 BPE
    python prepare_data.py 'texts/**/*.txt'     # your own: a file, a folder or a quoted glob. A text file is one document,
                                                # so one alone is too few; in .jsonl, .json and .parquet each row is one
    python prepare_data.py OWNER/REPO           # a dataset on the hub that is llm.c shards already: taken as it is
    python prepare_data.py stdlib --verify      # check every byte of data/stdlib

A folder of shards holds llm.c's files, <name>_{train,val}_%06d.bin: 256 little-endian int32 (20240520, 1, number of
tokens, zeros), then the tokens as uint16, end of text before each document; and meta.json, which describes them.
The same command writes the same bytes, however many processes share the work.

`Corpus` is how the other scripts read such a folder, or one with nanoGPT's train.bin and val.bin.
"""

import functools
import glob
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

import config


@dataclass
class Settings:
    out: str = ""                     # folder of the shards; "": data/<name of the source>
    tokenizer: str = ""               # "byte" or "gpt2"; "": byte for stdlib, gpt2 for everything else
    val_fraction: float = 0.0         # share of the documents that is held out; 0: the source's own
    shard_tokens: int = 100_000_000   # tokens in a shard
    column: str = "text"              # where .jsonl, .json and .parquet hold the text
    num_proc: int = 0                 # processes that run GPT-2's tokenizer; 0: one per core
    verify: bool = False              # prepare nothing: check all ids and sha256 of a folder that exists

    def __post_init__(self):
        if self.tokenizer not in ("", *TOKENIZERS):
            raise ValueError(f"tokenizer must be {' or '.join(TOKENIZERS)}, not {self.tokenizer!r}")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction must be at least 0 and below 1, not {self.val_fraction}")
        if not (1 <= self.shard_tokens < 2**31 and self.num_proc >= 0):
            raise ValueError("shard_tokens must be between 1 and 2**31 - 1, and num_proc at least 0")


# name: repository on the hub, its configuration, share of the documents that is held out
SOURCES = {"stdlib": (None, None, 0.04),
           "tinystories": ("roneneldan/TinyStories", None, 0.005),
           "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", 0.0005)}
LOCAL = (None, None, 0.05)
KINDS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
TOKENIZERS = {"byte": (257, 256), "gpt2": (50257, 50256)}  # ids, the last of them is end of text
MAGIC, VERSION, HEADER = 20240520, 1, 1024                 # llm.c's; the header's length in bytes
SHARD = re.compile(r"(?:[\w.-]*_)?(train|val)(?:_\d+)?\.bin")
CHUNK = 64                                                 # documents that a process takes at a time


# ---------------------------------------------------------------------------------------------------------
# tokens

@functools.lru_cache
def gpt2():
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as error:                             # whatever tiktoken's HTTP library raises comes through
        raise ValueError(f"tiktoken cannot load GPT-2's vocabulary ({config.reason(error)}): check the connection, "
                         f"or set TIKTOKEN_CACHE_DIR to a folder that holds it")


def encode(tokenizer, text):
    """Text -> ids (n,) uint16. Special strings in it are ordinary text."""
    data = text.encode("utf-8", "replace")
    if tokenizer == "byte":
        return np.frombuffer(data, np.uint8).astype("<u2")
    return gpt2().encode_to_numpy(data.decode(), disallowed_special=()).astype("<u2")


def token_bytes(tokenizer):
    """The bytes that each id stands for, in a list; b"" for end of text."""
    n = TOKENIZERS[tokenizer][1]
    return [bytes([i]) if tokenizer == "byte" else gpt2().decode_single_token_bytes(i) for i in range(n)] + [b""]


# ---------------------------------------------------------------------------------------------------------
# reading

def read_shard(path):
    """A file of llm.c's or nanoGPT's -> its tokens, a memory map of uint16. Raises ValueError with one line."""
    if os.path.exists(path) and not os.path.isfile(path):                      # a pipe would be waited for
        raise ValueError(f"{path} is not a file: prepare it again")
    try:
        size, header = os.path.getsize(path), np.fromfile(path, "<i4", HEADER // 4)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {config.reason(error)}")
    offset, n = 0, size // 2                               # nanoGPT's files are tokens and nothing else
    whole, first = len(header) == HEADER // 4, header[:3].tolist()
    if whole and first[:2] == [MAGIC, VERSION]:
        offset, n = HEADER, first[2]
    elif first[:1] == [MAGIC] or whole and not header[3:].any():
        raise ValueError(f"{path} has a garbled header, or one for tokens that do not fit uint16: prepare it again")
    if size == 0 or n < 1 or size != offset + 2 * n:
        raise ValueError(f"{path} is empty or not whole ({size:,} bytes, should be {offset + 2 * n:,}): prepare it again")
    return np.memmap(path, "<u2", "r", offset, (n,))


def check_ids(path, ids, vocab_size):
    if ids.max() >= vocab_size:
        raise ValueError(f"{path} holds the id {ids.max()}, but its tokenizer has {vocab_size:,}: prepare it again")


def describe(paths, meta):
    """meta and, as in meta.json, what there is to say of shards that came without it."""
    splits = {"train": {"tokens": 0, "shards": []}, "val": {"tokens": 0, "shards": []}}
    for path in paths:
        split, tokens = splits[SHARD.fullmatch(path.name)[1]], len(read_shard(path))
        split["tokens"] += tokens
        split["shards"].append({"file": path.name, "tokens": tokens})
    return meta | {"splits": splits}


class Corpus:
    """
    A folder of shards, checked and open for reading. Whatever is wrong raises ValueError with one line.

        corpus = Corpus("data/stdlib")
        x, y = corpus.batch("train", seed=0, step=0, size=16, block_size=256)      # (16, 256) each; y is x, one later

    `identity` says in plain types which data this is. Nothing stays open between two reads, so neither memory nor
    the number of open files grows with the corpus.
    """

    def __init__(self, folder):
        self.folder = folder = Path(folder)
        path = folder / "meta.json"
        try:
            paths = sorted(p for p in folder.glob("*.bin") if SHARD.fullmatch(p.name))
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a file: remove it and run python prepare_data.py again")
            if path.exists():
                self.meta = json.loads(path.read_text(encoding="utf-8"))
            elif paths:                                    # nanoGPT's, or llm.c's own
                vocab_size, eot = TOKENIZERS["gpt2"]
                about = {"name": folder.name, "tokenizer": "gpt2", "vocab_size": vocab_size, "eot": eot}
                self.meta = describe(paths, about)
            else:
                raise ValueError(f"no prepared data in {folder}: run python prepare_data.py (--help lists the sources)")
            self.name, self.tokenizer = str(self.meta["name"]), self.meta["tokenizer"]
            self.vocab_size, self.eot = self.meta["vocab_size"], self.meta["eot"]
            listed = [(split, shard["file"], shard["tokens"]) for split in ("train", "val")
                      for shard in self.meta["splits"][split]["shards"]]
            inside = all(SHARD.fullmatch(file) for _, file, _ in listed)       # a name cannot leave the folder
            if not inside or TOKENIZERS[self.tokenizer] != (self.vocab_size, self.eot):
                raise KeyError
        except OSError as error:
            raise ValueError(f"cannot read {path}: {config.reason(error)}")
        except (KeyError, TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} is garbled: remove the folder and run python prepare_data.py again")
        self.identity = {"name": self.name, "tokenizer": self.tokenizer, "vocab_size": self.vocab_size,
                         "sha256": hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode()).hexdigest()}
        self.shards = {"train": [], "val": []}             # (path, bytes before its tokens, tokens)
        for split, file, tokens in listed:
            ids = read_shard(folder / file)
            if len(ids) != tokens:
                raise ValueError(f"{folder / file} has {len(ids):,} tokens, but meta.json says {tokens}: prepare it again")
            check_ids(folder / file, ids[np.linspace(0, len(ids) - 1, 100).astype(np.int64)], self.vocab_size)
            self.shards[split].append((folder / file, ids.offset, len(ids)))
        self.tokens = {split: sum(tokens for *_, tokens in shards) for split, shards in self.shards.items()}

    def batch(self, split, seed, step, size, block_size, first=0, count=None):
        """
        x, y (count, block_size) int64: windows first, first + 1, ... of the `size` windows of a step (default: all).
        A pure function of its arguments. Ranks and micro-batches are slices of one batch; a resume needs no position.
        """
        before = self.windows_before(split, block_size, lambda tokens: tokens - block_size)
        picks = np.random.default_rng((seed, step)).integers(before[-1], size=size)[first:][:count]
        shards = np.searchsorted(before, picks, side="right") - 1
        starts = picks - before[shards]
        rows = np.stack([self.read(split, shard, start, block_size + 1) for shard, start in zip(shards, starts)])
        return rows[:, :-1].copy(), rows[:, 1:].copy()     # contiguous, as torch.compile expects all batches to be

    def windows(self, split, n_tokens, block_size):
        """x, y (n, block_size) int64: the first windows of a split, side by side, at most n_tokens in all, at least one."""
        before = self.windows_before(split, block_size, lambda tokens: (tokens - 1) // block_size)
        wanted = np.diff(np.minimum(before, max(1, n_tokens // block_size)))       # windows of each shard
        runs = [self.read(split, shard, 0, n * block_size + 1) for shard, n in enumerate(wanted) if n]
        x, y = np.concatenate([run[:-1] for run in runs]), np.concatenate([run[1:] for run in runs])
        return x.reshape(-1, block_size), y.reshape(-1, block_size)

    def windows_before(self, split, block_size, windows_of):
        """Windows before each shard, and in all of them: (shards + 1,). No window crosses from one shard to the next."""
        before = np.cumsum([0] + [max(0, windows_of(tokens)) for *_, tokens in self.shards[split]])
        if before[-1] == 0:
            longest = max([tokens for *_, tokens in self.shards[split]], default=0)
            raise ValueError(f"no shard of the {split} split in {self.folder} has more than {longest:,} tokens, fewer than "
                             f"block_size + 1 = {block_size + 1:,}: use a smaller --block_size or more data")
        return before

    def read(self, split, shard, start, n):
        path, offset, _ = self.shards[split][shard]
        return np.fromfile(path, "<u2", n, offset=offset + 2 * int(start)).astype(np.int64)        # (n,)

    def verify(self):
        """Check every id of every shard, and its sha256 where meta.json knows it."""
        for shard in self.meta["splits"]["train"]["shards"] + self.meta["splits"]["val"]["shards"]:
            path = self.folder / shard["file"]
            check_ids(path, read_shard(path), self.vocab_size)
            if shard.get("sha256", digest := sha256(path)) != digest:
                raise ValueError(f"{path} is not what meta.json describes, its sha256 differs: prepare it again")


def sha256(path):
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()


# ---------------------------------------------------------------------------------------------------------
# sources

def stdlib_documents():
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix)
    return [(root / path).read_bytes().decode("utf-8", "replace") for path in paths if not skip & set(path.parts)]


def dataset_documents(what, advice, column, *args, **kwargs):
    """A column of datasets.load_dataset(*args, **kwargs): memory-mapped, its slices are lists of str."""
    try:
        import datasets
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)              # it logs what it raises, too
        data = datasets.load_dataset(*args, **kwargs, split="train")
    except Exception as error:                             # Arrow's, the hub's, the HTTP library's, the disk's
        config.fail(f"cannot read {what} ({config.reason(error)}): {advice}")
    if column not in data.column_names:
        config.fail(f"{what} has no column {column!r}, only {', '.join(data.column_names)}: choose one with --column=...")
    if getattr(data.features[column], "dtype", None) not in ("string", "large_string"):
        config.fail(f"the column {column!r} of {what} is not text: choose another with --column=...")
    return data.select_columns([column])[column]


def local_documents(source, column):
    """A file, a folder (of the files that KINDS knows) or a glob, through `datasets`."""
    folder = Path(source).is_dir()
    paths = Path(source).rglob("*") if folder else map(Path, [source, *glob.glob(source, recursive=True)])
    paths = {path for path in paths if path.is_file() and (path.suffix in KINDS or not folder)}
    kinds = {next((KINDS[suffix] for suffix in reversed(path.suffixes) if suffix in KINDS), "text") for path in paths}
    if not paths:
        config.fail(f"no file {source}, nor text in such a folder or glob ({', '.join(KINDS)} are read)")
    if len(kinds) > 1:
        config.fail(f"{source} mixes {' and '.join(sorted(kinds))}: choose one kind with a glob like 'texts/**/*.txt'")
    kind, files = kinds.pop(), [glob.escape(path.as_posix()) for path in sorted(paths, key=Path.as_posix)]
    if kind == "text":
        return dataset_documents(source, "it should be UTF-8", "text", kind, data_files=files, sample_by="document")
    return dataset_documents(source, f"it should be {kind}, a row per document", column, kind, data_files=files)


HUB_ADVICE = "check the name and the connection, set HF_ENDPOINT to a mirror, or pass the path of a local copy"


def hub_shards(repository, folder, request):
    """Bring a repository's shards into the folder and check all of them -> meta.json's content."""
    try:
        from huggingface_hub import snapshot_download
        root = snapshot_download(repository, repo_type="dataset", allow_patterns="*.bin")      # resumes by itself
    except Exception as error:                             # the hub's, the HTTP library's, the disk's
        config.fail(f"{repository} is no path here, and the hub does not give it ({config.reason(error)}): {HUB_ADVICE}")
    for path in Path(root).rglob("*.bin"):
        if SHARD.fullmatch(path.name):
            try:
                os.link(path.resolve(), folder / path.name)
            except OSError:                                # another file system
                shutil.copyfile(path, folder / path.name)
    meta = describe(sorted(folder.iterdir()), request)
    for name, split in meta["splits"].items():
        if not split["shards"]:
            config.fail(f"{repository} has no {name} shards (*_{name}_*.bin): if it is text, pass the path of a local copy")
        split["documents"] = 0
        for shard in split["shards"]:
            path = folder / shard["file"]
            ids = read_shard(path)
            check_ids(path, ids, meta["vocab_size"])
            split["documents"] += int(np.count_nonzero(ids == meta["eot"]))
            shard["sha256"] = sha256(path)
    return meta


def source_name(source):
    """'texts/**/*.txt' -> 'texts', 'a/corpus.jsonl' -> 'corpus', 'owner/repo' -> 'repo'."""
    parts = [part for part in Path(source).parts if re.search(r"\w", part) and not glob.has_magic(part)]
    return re.sub(r"[^\w.-]", "_", re.sub(f"({'|'.join(KINDS)})$", "", parts[-1] if parts else "text"))


# ---------------------------------------------------------------------------------------------------------
# tokenizing, by several processes

work = None                                                # in each process: documents, tokenizer, val_fraction


def start_process(*args):
    global work
    work = args
    signal.signal(signal.SIGINT, signal.SIG_IGN)           # Ctrl-C is the parent's affair; its death is ours, too
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def tokenize(start):
    """A chunk of documents -> {split: (number of documents, their tokens (n,) uint16)}."""
    documents, tokenizer, val_fraction = work
    end_of_text = np.array([TOKENIZERS[tokenizer][1]], "<u2")
    parts = {"train": [], "val": []}
    for text in documents[start:start + CHUNK]:
        if text:                                           # neither empty nor missing
            digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
            held_out = int.from_bytes(digest, "big") < val_fraction * 2**64
            parts["val" if held_out else "train"] += [end_of_text, encode(tokenizer, text)]
    return {split: (len(arrays) // 2, np.concatenate([end_of_text[:0], *arrays])) for split, arrays in parts.items()}


def tokenize_all(documents, tokenizer, val_fraction, num_proc):
    """The results of tokenize() over all documents, in order; only a few wait in memory."""
    global work
    work = documents, tokenizer, val_fraction
    starts = range(0, len(documents), CHUNK)
    num_proc = min(num_proc or os.cpu_count(), len(starts))
    if tokenizer == "byte" or num_proc < 2:                # bytes cost more to send than to convert
        yield from map(tokenize, starts)
        return
    with ProcessPoolExecutor(num_proc, initializer=start_process, initargs=work) as pool:
        waiting = deque()
        for start in starts:
            waiting.append(pool.submit(tokenize, start))
            if len(waiting) > 4 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---------------------------------------------------------------------------------------------------------
# writing

class ShardWriter:
    """The tokens of one split, cut into files of shard_tokens."""

    def __init__(self, prefix, shard_tokens):
        self.prefix, self.shard_tokens, self.file = prefix, shard_tokens, None
        self.split = {"tokens": 0, "documents": 0, "shards": []}               # for meta.json

    def write(self, documents, tokens):
        self.split["documents"] += documents
        self.split["tokens"] += len(tokens)
        while len(tokens):
            if self.file is None:
                self.file, self.filled = open(f"{self.prefix}_{len(self.split['shards']):06d}.bin", "wb"), 0
                self.file.write(bytes(HEADER))
            part, tokens = np.split(tokens, [self.shard_tokens - self.filled])
            self.file.write(part)
            self.filled += len(part)
            if self.filled == self.shard_tokens:
                self.close()

    def close(self):
        if self.file is not None:
            self.file.seek(0)
            self.file.write(np.array([MAGIC, VERSION, self.filled], "<i4"))
            close(self.file)
            self.split["shards"].append({"file": os.path.basename(self.file.name), "tokens": self.filled,
                                         "sha256": sha256(self.file.name)})
            self.file = None


def close(file):
    """Close a file, the bytes on the disk: a power cut after the folder got its name must not find it empty."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def write_shards(folder, documents, request, num_proc):
    """Tokenize documents into a folder of shards -> meta.json's content, which is the request and the splits."""
    name, tokenizer, val_fraction = request["name"], request["tokenizer"], request["val_fraction"]
    writers = {split: ShardWriter(f"{folder}/{name}_{split}", request["shard_tokens"]) for split in ("train", "val")}
    start = time.time()
    with tqdm(total=len(documents), unit=" documents", desc=name) as bar:
        for chunk in tokenize_all(documents, tokenizer, val_fraction, num_proc):
            for split, (n, tokens) in chunk.items():
                writers[split].write(n, tokens)
            total = sum(writer.split["tokens"] for writer in writers.values())
            bar.set_postfix_str(f"{total / (time.time() - start):,.0f} tokens/s", refresh=False)
            bar.update(min(CHUNK, bar.total - bar.n))
    for writer in writers.values():
        writer.close()
    splits = {split: writer.split for split, writer in writers.items()}
    if not any(split["documents"] for split in splits.values()):
        config.fail(f"{request['source']} holds no text")
    for split in splits:
        if not splits[split]["documents"]:
            config.fail(f"{request['source']} has too few documents: none fell to the {split} split with "
                        f"--val_fraction={val_fraction}; choose another or add documents")
    return request | {"splits": splits}


def prepare(source, out, settings):
    """Make `out` the folder of shards that source and settings ask for, unless it is that already."""
    repository, subset, val_fraction = SOURCES.get(source, LOCAL)
    on_hub = re.fullmatch(r"(?:hf://)?(?:datasets/)?([\w.-]+/[\w.-]+)", source)
    shards_of = on_hub[1] if on_hub and not Path(source).exists() and Path(source).suffix not in KINDS else None
    tokenizer = settings.tokenizer or ("byte" if source == "stdlib" else "gpt2")
    vocab_size, eot = TOKENIZERS[tokenizer]
    request = {"name": source_name(source), "source": source, "tokenizer": tokenizer, "vocab_size": vocab_size, "eot": eot}
    if source == "stdlib":
        request["source"] = f"the standard library of Python {platform.python_version()}"
    if not shards_of:
        request |= {"val_fraction": settings.val_fraction or val_fraction, "shard_tokens": settings.shard_tokens,
                    "column": settings.column}

    # All work happens in a hidden folder beside `out`, which takes its place when whole: whatever kills this process,
    # nothing half-written looks like data. The lock goes with the process and its workers, at most moments later.
    building = out.parent / f".{out.name}.building"
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{building}.lock", timeout=1):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            there = Corpus(out).meta
            for key in request:
                if there.get(key) != request[key]:
                    config.fail(f"{out} has {key} {there.get(key)}, not {request[key]}: remove it or choose another --out")
            print(f"{out} is prepared already; remove it to prepare it anew")
            return
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            if shards_of:
                meta = hub_shards(shards_of, building, request)
            else:
                if tokenizer == "gpt2":
                    gpt2()                                 # may fail: better here than in every process
                if source == "stdlib":
                    documents = stdlib_documents()
                elif repository:
                    documents = dataset_documents(repository, HUB_ADVICE, "text", repository, subset)
                else:
                    documents = local_documents(source, settings.column)
                meta = write_shards(building, documents, request, settings.num_proc)
            f = open(building / "meta.json", "w", encoding="utf-8")
            f.write(json.dumps(meta, indent=1) + "\n")
            close(f)
            os.rename(building, out)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def main():
    argv = config.join_values(Settings, sys.argv[1:])
    sources = [arg for arg in argv if not arg.startswith("-")] or ["stdlib"]
    settings = config.parse(Settings, __doc__, [arg for arg in argv if arg.startswith("-")])
    if len(sources) > 1:
        config.fail(f"{len(sources)} sources, but one at a time: quote a glob, so that the shell leaves it alone")
    out = Path(settings.out or Path("data") / source_name(sources[0]))
    try:
        if not settings.verify:
            prepare(sources[0], out, settings)
        corpus = Corpus(out)
        if settings.verify:
            corpus.verify()
    except ValueError as error:
        config.fail(str(error))
    except Timeout:
        config.fail(f"another process is preparing {out}: wait for it or choose another --out")
    except BrokenProcessPool:
        config.fail("a tokenizing process was killed, perhaps for want of memory: try a smaller --num_proc")
    except OSError as error:
        config.fail(f"cannot write {out}: {config.reason(error)}")
    except KeyboardInterrupt:
        config.fail(f"interrupted: nothing is left in {out}, run the same command again")
    for key, value in corpus.identity.items():
        print(f"{key}: {value}")
    for split, shards in corpus.shards.items():
        print(f"{split}_tokens: {corpus.tokens[split]}\n{split}_shards: {len(shards)}")
    print(f"{'verified' if settings.verify else 'out'}: {out}")


if __name__ == "__main__":
    config.run(main)
