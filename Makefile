# `make demo` and `make test` need only Python, make and pip: each sets up its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One torch for everything that is installed after it; pip would otherwise take the newest.
TORCH := torch==2.13.0
# pip would compile all files of all packages, a minute and a half of work. What every run imports, an
# eighth of them, is compiled here once, not by each of its ranks; and it is kept, whatever the
# environment says.
export PYTHONDONTWRITEBYTECODE :=
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --no-compile
IMPORTED := datasets, peft, torch._dynamo, transformers.models.llama.modeling_llama, shardtune.train

# Tests run two at a time: a process starts on one core, whatever it does with two afterwards. Those
# of a file that start ranks stay together and share them; four at a time, as they often wait, those
# marked `early` first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
TWO := -n 2 --dist worksteal
RANKS := -n 4 --dist loadfile --no-loadscope-reorder
# Programs that run side by side print one after the other, where make can do that (from 4.0 on).
IN_TURN := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: demo quick test test-all check lint formatted types imports exam docs format clean

# Each part says what it does; pip and the run say how long they still take.
demo: $(VENV)/demo
	@echo "== 4 of 5: the model (downloaded and unpacked into ~/.cache/shardtune, or found there)"
	@$(BIN)/shardtune models pull smollm2-135m-instruct
	@echo "== 5 of 5: training (2 ranks, 2 to 4 minutes on two quiet cores)"
	@$(BIN)/shardtune train recipes/quickstart.yaml --overwrite

# Style, types, imports, and all tests that take less than a second and start no process: 3 to 4
# minutes on two quiet cores (docs/LOG.md has the times of some).
quick: check
	$(PYTEST) $(TWO) -m "not long and not process and not slow"

test: quick
	$(PYTEST) $(RANKS) -m "(process or slow) and not long and not build"

# What `make test` leaves out as well; DeepSpeed's C++ part is compiled first.
test-all: check
	$(PYTEST) -m build
	$(PYTEST) $(TWO) -m "not build and not process"
	$(PYTEST) $(RANKS) -m "process and not build"

# Every promise about faults, kept or not: 20 to 25 minutes on 2 quiet cores. strace kills at system calls.
exam: $(VENV)/dev
	@command -v strace > /dev/null || echo "strace is not installed (apt-get install strace): kills at random moments only"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exam

# The site, into site/. A link, an anchor or a page of the navigation that leads nowhere is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Side by side; all that any of them has to say is said before make fails.
check: $(VENV)/dev
	@$(MAKE) --no-print-directory --jobs 4 --keep-going $(IN_TURN) types imports lint formatted

types:
	$(BIN)/mypy --num-workers 2

imports:
	$(BIN)/lint-imports

lint:
	$(BIN)/ruff check .

formatted:
	$(BIN)/ruff format --check .

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/torch:
	@echo "== 1 of 5: an environment in $(VENV) (seconds)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== 2 of 5: $(TORCH) (half a minute, and its download)"
	@$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	@echo "== 3 of 5: shardtune and the packages that it needs (half a minute, and their download)"
	@$(INSTALL) --editable '.[demo]'
	@$(BIN)/python -c "import $(IMPORTED)"
	@touch $@

$(VENV)/dev: $(VENV)/torch pyproject.toml
	@echo "== shardtune with all that its tests need (a minute, and the downloads)"
	@$(INSTALL) --editable '.[demo,dev,docs,deepspeed,quant,ray,serve]'
	@$(BIN)/python -c "import $(IMPORTED)"
	touch $@ $(VENV)/demo $(VENV)/docs

$(VENV)/docs: $(VENV)/torch pyproject.toml
	$(INSTALL) --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site
