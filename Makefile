# make demo and make test install what they need into .venv first; nothing else is asked of the machine than
# Python >= 3.10, make and, for the fast CPU kernels, a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types docs package install clean

demo: $(READY)
	$(BIN)/python bench/demo.py

# Up to four processes, of one thread each.
test: lint types
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal --durations 25 --durations-min 5

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the import hook of an editable install: show it the package as a folder of links.
types: $(READY) links
	$(BIN)/mypy

.PHONY: links
links:
	rm -rf build/types && mkdir -p build/types/surgeon_fx
	ln -sfn "$(CURDIR)"/surgeon_fx/* "$(CURDIR)/kernels" "$(CURDIR)/passes" build/types/surgeon_fx/

# The site, in build/site. Installs the docs extra, which `make test` does without.
docs: $(READY) links
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict

# Source archive and wheel, in dist/.
package: $(READY)
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

install: $(READY)

$(READY): pyproject.toml setup.py $(wildcard kernels/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/native/*.so
