# Two commands: `make demo` and `make test`. Both set up .venv on first use and reuse it afterwards; the demo needs a small
# part of what the tests need, so each has a mark of its own there.

PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3) python3)
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
READY := $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check table1 table2 figures appendix cifar10 bench bench-penalty bench-quant bench-peers bench-helpers bench-allocate bench-order bench-scale bench-strangers bench-operators bench-strangers-speed soak fuzz docs setup clean

demo: $(LIGHT)
	@$(BIN)/anybit demo

# A process per core, each on one thread: most tests are too small to share. They start hundreds of programs, which load
# compiled modules if the first one may keep them.
test: check
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# The paper, one command each; what stands in ARGS goes on: make table1 ARGS="--network vgg-like --seeds 0,1,2"
table1 table2: $(READY)
	@$(BIN)/python -m paper.table $@ $(ARGS)

figures: $(READY)
	@$(BIN)/python -m paper.figures $(ARGS)

appendix: $(READY)
	@for part in $(or $(PART),a b c); do $(BIN)/python -m paper.appendix $$part $(ARGS) || exit; echo; done

cifar10: $(READY)
	@$(BIN)/python -m paper.cifar10

bench: $(READY)
	@$(BIN)/python benchmarks/import_time.py

bench-penalty: $(READY)
	@$(BIN)/python benchmarks/penalty.py

bench-quant: $(READY)
	@$(BIN)/python benchmarks/quant.py

bench-peers: $(READY)
	@$(BIN)/python benchmarks/peers/run.py $(ARGS)

bench-helpers: $(READY)
	@$(BIN)/python benchmarks/helpers.py

bench-allocate: $(READY)
	@$(BIN)/python benchmarks/allocate.py

bench-order: $(READY)
	@PYTHONPATH=. $(BIN)/python benchmarks/order.py

bench-scale: $(READY)
	@$(BIN)/python benchmarks/scale.py

bench-strangers: $(READY)
	@$(BIN)/python benchmarks/strangers/run.py

bench-operators: $(READY)
	@$(BIN)/python benchmarks/operators.py

bench-strangers-speed: $(READY)
	@$(BIN)/python benchmarks/strangers/speed.py

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(READY)
	@$(BIN)/python benchmarks/soak.py

SECONDS ?= 600
fuzz: $(READY)
	@$(BIN)/python benchmarks/fuzz.py --seconds $(SECONDS) --seed $$(date +%s) --out results/fuzz.json

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "anybit needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make with PYTHON=/path/to/python")'
	@$(PYTHON) -m venv $(VENV)

$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the demo needs into $(VENV) (once; a minute or two)"
	@$(INSTALL) -e '.[demo]'
	@touch $(LIGHT)

$(READY): pyproject.toml constraints.txt paper/requirements.txt | $(BIN)/python
	@echo "installing what developers need into $(VENV) (once; a few minutes)"
	@$(INSTALL) -e '.[dev]' -r paper/requirements.txt
	@touch $(LIGHT) $(READY)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
