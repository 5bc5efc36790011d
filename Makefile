# `make help` lists the targets. They install into .venv, from requirements*.txt, whose packages are pinned by hash.
SHELL := /bin/bash
PYTHON ?= python3
UV_VERSION := 0.13.8
BIN := .venv/bin
FFCV_PACKAGES := libopencv-dev libturbojpeg0-dev pkg-config
BROWSER_PACKAGES := chromium chromium-driver
# $(call apt,<packages>) installs Debian packages as root; for other users and on other systems it fails
apt = { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq >/dev/null \
  && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) </dev/null >/dev/null; }

.DEFAULT_GOAL := help
.PHONY: help setup ffcv peers browser demo demo-vectors test check test-portable gpu coverage lint docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/ready .venv/ffcv ## install everything into .venv; does nothing if it is up to date

.venv/ready: requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python .venv --compile-bytecode --require-hashes -r requirements.txt
	$(BIN)/uv pip install --quiet --python .venv --no-deps --no-build-isolation -e .
	@touch $@

# FFCV has no wheels. Where its headers are missing and cannot be installed, the torch loaders replace it.
.venv/ffcv: .venv/ready requirements-ffcv.txt
	@pkg-config --exists opencv4 libturbojpeg 2>/dev/null || $(call apt,g++ $(FFCV_PACKAGES)) || true
	@if pkg-config --exists opencv4 libturbojpeg 2>/dev/null \
	    && $(BIN)/uv pip install --quiet --python .venv --require-hashes --no-deps -r requirements-ffcv.txt; then touch $@; \
	else echo "FFCV is not installed: it needs $(FFCV_PACKAGES) and g++ (as root: apt-get install them, then make ffcv)." \
	          "Without it, the torch loaders read the images."; fi

ffcv: .venv/ffcv ## build FFCV, after its system packages were installed

peers: .venv/peers ## install Quantus, pytorch-grad-cam, zennit and LXT, with which tests compare

.venv/peers: .venv/ready requirements-peers.txt
	$(BIN)/uv pip install --quiet --python .venv --require-hashes --no-deps -r requirements-peers.txt
	@touch $@

browser: ## install Chromium and its driver, for the tests of the gallery; needs root and apt-get
	@{ command -v chromium && command -v chromedriver; } >/dev/null || $(call apt,$(BROWSER_PACKAGES)) \
	|| echo "Chromium is not installed: as root, apt-get install $(BROWSER_PACKAGES)."

# For these small models, several threads wait longer for one another than they compute: one thread, two processes.
demo demo-vectors: export OMP_NUM_THREADS ?= 1
QUIET := hydra/hydra_logging=disabled callbacks.progress=null trainer.enable_model_summary=false

demo: setup ## train and measure TVE and AnyHead on the embedded digits: a table, curves and a gallery in runs/demo_eval
	@$(BIN)/python train.py experiment=demo/target
	@{ $(BIN)/python train.py -m experiment=demo/head data.task=odd,five_or_more,loop $(QUIET) \
	    && $(BIN)/python train.py experiment=demo/anyhead; } & \
	  $(BIN)/python train.py experiment=demo/tve && wait $$!
	@$(BIN)/python eval.py experiment=demo/eval

# Two processes at a time, one for each domain: $(call by_domain,<experiment>,<option that names the domain>,<options>)
by_domain = $(BIN)/python train.py -m experiment=$(1) $(2)=plain $(3) & $(BIN)/python train.py -m experiment=$(1) $(2)=small $(3) && wait $$!

demo-vectors: setup ## train and measure explainability vectors on the digits: a table, curves and heatmaps in runs/demo_vectors_eval
	@$(BIN)/python train.py experiment=demo/base trainer=ddp trainer.devices=2
	@$(call by_domain,demo/predicting,data.domain,$(QUIET))
	@$(call by_domain,demo/source,data.without,$(QUIET))
	@$(call by_domain,demo/vector,data.domain,hydra/hydra_logging=disabled)
	@$(BIN)/python eval.py experiment=demo/vectors_eval trainer=ddp trainer.devices=2

# Python keeps compiled modules, so that processes of tests need not compile them again
test check test-portable coverage: export PYTHONDONTWRITEBYTECODE :=

# Three processes, because many tests wait for programs that they started: two leave a seventh of two cores idle
test: setup lint ## lint, check types and run all tests, on two cores
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=10

check: setup lint ## lint, check types and run the quick tests, each with one of its parameters, for daily work
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick

test-portable: setup ## run all tests on three kinds of kernels, with 1 and 4 threads; TESTS=tests/metrics selects some
	@failed=; for kernels in default avx2 native; do for threads in 1 4; do \
	  case $$kernels in \
	    default) set -- ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41;; \
	    avx2) set -- ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2;; \
	    native) set --;; \
	  esac; \
	  echo "== $$kernels kernels, $$threads threads"; \
	  env "$$@" MKL_DYNAMIC=FALSE OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$$threads \
	    $(BIN)/python -m pytest -q -n 2 --dist worksteal $(TESTS) || failed="$$failed $$kernels-$$threads"; \
	done; done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu: setup ## on a GPU, run its tests and measure memory, speed and resumption: one page in runs/gpu
	@$(BIN)/python benchmarks/gpu.py

coverage: setup ## run the tests and report which lines they reach
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

lint: .venv/ready ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs ## build the documentation into site/; a broken link or an unknown argument in a docstring is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # with --quiet, warnings would be no errors

.venv/docs: .venv/ready requirements-docs.txt
	$(BIN)/uv pip install --quiet --python .venv --require-hashes --no-deps -r requirements-docs.txt
	@touch $@

lock: .venv/ready ## update requirements*.txt to the newest versions that setup.cfg allows
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	  --extra test setup.cfg -o requirements.txt
	printf 'ffcv==1.0.2\nopencv-python-headless\n' | $(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --no-annotate --python-version 3.11 - -c requirements.txt --override <(echo 'opencv-python; python_version < "3"') \
	  -o requirements-ffcv.txt
	printf 'quantus\ngrad-cam\nopencv-python-headless\nzennit<1\nlxt\n' | $(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --no-annotate --python-version 3.11 - -c requirements.txt -c requirements-ffcv.txt \
	  --override <(printf 'opencv-python; python_version < "3"\nbitsandbytes; python_version < "3"\n') -o requirements-peers.txt
	printf 'mkdocs-material\nmkdocstrings[python]\n' | $(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --no-annotate --python-version 3.11 - -c requirements.txt -o requirements-docs.txt

clean: ## delete runs/, site/ and caches of tools; .venv and cache/ stay
	rm -rf runs site .pytest_cache .mypy_cache .ruff_cache .coverage
