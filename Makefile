# make demo, make test, make lint, ...: each sets up what it needs in .venv, once, and again only
# when an input of that changed. It takes Python 3.10 or newer and a C and a C++ compiler.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# What the installed package is made from; the Python files themselves are used from here.
INPUTS := pyproject.toml build_ggml.py pyggml/_version.py $(wildcard pyggml/_ffi/kernels/*)

.PHONY: help demo examples test lint docs bench bench-check vulkan-deps build clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      train a classifier of handwritten digits; results in results/"
	@echo "make examples  run the short form of every example; results in results/short"
	@echo "make test      run the tests"
	@echo "make lint      check style and types"
	@echo "make docs      build the documentation into site/; a warning is an error"
	@echo "make bench     measure against PyTorch and JAX (installs both); results in results/"
	@echo "make bench-check  fail if pyggml has become slower beside them; FLAGS=--quick for minutes"
	@echo "make vulkan-deps  install what building for Vulkan needs (Debian, Ubuntu)"
	@echo "make build     build the native part into pyggml/_ffi, and a wheel into dist/"
	@echo "make clean     remove what was built here (the cache stays: see python build_ggml.py --help)"
	@echo "PYTHON=python3.12 chooses the Python that .venv is made with."

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(PYTHON) is not Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "make: making an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# .venv/NAME stands for "pyggml and its extra NAME are installed"; editable, so that edits count.
$(VENV)/examples $(VENV)/test $(VENV)/dev $(VENV)/docs $(VENV)/bench: $(VENV)/%: $(INPUTS) | $(RUN)
	@echo "make: installing pyggml with its extra '$*' into $(VENV); the first time, ggml is built too"
	@$(RUN) -m pip install --quiet --editable '.[$*]'
	@touch $@

demo: $(VENV)/examples
	@echo "make: running examples/digits.py"
	@$(RUN) examples/digits.py
	@echo "make: done; the results are in results/digits"

examples: $(VENV)/examples
	@set -e; for file in examples/*.py; do \
	  name=$$(basename $$file .py); \
	  case $$name in digits) short="--epochs 3" ;; *) short="--short" ;; esac; \
	  echo "make: $$file $$short"; \
	  $(RUN) $$file $$short --output results/short/$$name; \
	done

test: $(VENV)/test
	@echo "make: running the tests"
	@$(RUN) -m pytest

lint: $(VENV)/dev
	@echo "make: checking style and types"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

docs: $(VENV)/docs
	@echo "make: building the documentation"
	@$(RUN) -m mkdocs build --strict --quiet
	@echo "make: done; open site/index.html"

bench: $(VENV)/bench
	@echo "make: running the benchmarks; other work on this machine spoils them"
	@$(RUN) benchmarks/run.py --json results/bench.json --png results/bench.png $(FLAGS)

bench-check: $(VENV)/bench
	@echo "make: comparing with the floors; other work on this machine spoils it"
	@$(RUN) benchmarks/run.py --check benchmarks/floors.json $(FLAGS)

vulkan-deps:
	@$(PYTHON) tools/vulkan_deps.py

build: | $(RUN)
	@echo "make: building a wheel into dist/"
	@$(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

clean:
	@echo "make: removing $(VENV), dist and the built native part"
	@rm -rf $(VENV) dist build site *.egg-info pyggml/_ffi/lib pyggml/_ffi/*.so
