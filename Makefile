# Two commands: `make demo` and `make test`. Both set up .venv on first use and reuse it afterwards.

PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3) python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench bench-penalty bench-quant bench-helpers bench-allocate bench-order bench-scale soak fuzz docs setup clean

demo: $(READY)
	@$(BIN)/anybit demo

# A process per core, each on one thread: most tests are too small to share.
test: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@$(BIN)/python benchmarks/import_time.py

bench-penalty: $(READY)
	@$(BIN)/python benchmarks/penalty.py

bench-quant: $(READY)
	@$(BIN)/python benchmarks/quant.py

bench-helpers: $(READY)
	@$(BIN)/python benchmarks/helpers.py

bench-allocate: $(READY)
	@$(BIN)/python benchmarks/allocate.py

bench-order: $(READY)
	@$(BIN)/python benchmarks/order.py

bench-scale: $(READY)
	@$(BIN)/python benchmarks/scale.py

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(READY)
	@$(BIN)/python benchmarks/soak.py

SECONDS ?= 600
fuzz: $(READY)
	@$(BIN)/python benchmarks/fuzz.py --seconds $(SECONDS) --seed $$(date +%s) --out results/fuzz.json

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "anybit needs Python 3.11, this is " + sys.version.split()[0] + "; run make with PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
