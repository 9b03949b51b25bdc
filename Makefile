# make demo: from a bare clone to the trained tiny model, its tables and its plots
# make test: the tests, on a CPU, offline once the packages are there
# make test-long: hundreds of killed processes and mutated files; ends with their count

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long clean

demo: .venv/installed
	$(BIN)/python prepare_data.py stdlib
	$(BIN)/python train.py config/tiny.py --init_from=$(if $(wildcard out/tiny/ckpt.pt),resume,scratch)
	$(BIN)/python measure.py --ckpt out/tiny/ckpt.pt
	$(BIN)/python allocate.py --ckpt out/tiny/ckpt.pt
	$(BIN)/python sample.py --ckpt out/tiny/ckpt.pt --prompt "import os" --html out/tiny/depth.html

test: .venv/installed
	$(BIN)/python -m pytest -q tests

test-long: .venv/installed
	NANOLOOP_LONG=1 $(BIN)/python -m pytest -q tests/test_faults.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements.txt
	touch $@

clean:
	rm -rf .venv out/tiny data/stdlib
