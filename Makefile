# Every target works from a fresh clone; the virtual environment is made once and then reused.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS = 1

.PHONY: demo test test-slow test-triton test-hosts check docs-check clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,report,hf,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/layerwise compare --config examples/demo.yaml --strategies dynamic,repack+parents --out runs/demo --overwrite

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not hosts"

# The CUDA kernels of the exchange in Triton's interpreter, on the CPU. Downloads Triton, 286 MB, the first time.
test-triton: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/exchange/test_rows.py

# Faults and several hosts, with limits in seconds: one after the other, on a machine that does nothing else; some need root.
test-hosts: $(STAMP)
	$(BIN)/python -m pytest -m hosts

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs examples README.md CHANGELOG.md

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
