# Requirements: a clean clone, python3 (3.11 or newer), a C compiler and make. Every target installs the rest in ./.venv.

PYTHON ?= python3
# Tried if python3 is too old or does not run, such as a shim of pyenv without its version (tools/setup_venv.py).
PYTHONS := python3.14 python3.13 python3.12 python3.11 /usr/bin/python3
PYTEST_ARGS ?=
LOCK_ARGS ?=
RELEASE ?=
ENGINE ?= docker
SOAK ?=
DEMO_ARGS ?=
CURVES_ARGS ?=
ENV ?= LunarLander-v3
LEARNERS ?= 1
MUTANTS_ARGS ?=
SEEDS ?= 100
FIRST ?= 1
PART ?= A
GAME ?= breakout
CONTEST_ARGS ?=
SIMULATE_ARGS ?=
PROTOCOL_ARGS ?=
# Tests wait for sockets and processes half of the time: four workers keep two cores busy.
PYTEST_WORKERS ?= -n 4 --dist worksteal
# Quick tests do not wait: one worker for each core.
QUICK_WORKERS ?= -n auto --dist worksteal
# Python keeps compiled files, also if CI forbids it. Otherwise hundreds of child processes would compile the package.
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin
# Folder of torch for tests: 1 GB, or 5 GB with CUDA's libraries. Checkouts may share it.
export MEMOIRE_TORCH ?= $(CURDIR)/build/torch

# PYTHONPATH puts the checked build before the editable install. PYTHONSAFEPATH hides the plain build, which is in the
# working directory, from every child process.
CHECKED := PYTHONPATH=$(CURDIR)/build/checked/lib PYTHONSAFEPATH=1 MEMOIRE_CHECKED=1

LINTS := lint-ruff lint-format lint-types lint-stubs lint-cython lint-spelling lint-english lint-imports lint-structure lint-chart lint-pictures

.PHONY: help simulate simulate-plants protocol demo demo-ppo demo-sac test test-quick test-plain test-checked test-pages test-chart test-torch chart docs site pictures release image structure lock soak curves contest mutants messages lint $(LINTS) format bench bench-peers instructions wheel audit clean setup setup-dev setup-checked setup-torch setup-ppo

help:
	@echo "make demo          a replay cluster on this machine: actors, proxy, server, learner, until CartPole is solved; DEMO_ARGS=--keep continues"
	@echo "make demo-ppo      on-policy learning: LunarLander by PPO, collectors without torch; ENV=CartPole-v1 LEARNERS=2; installs torch, 1 GB or more"
	@echo "make demo-sac      a server, two workers and a trainer balance MuJoCo's double pendulum by SAC; two of them are killed during the run"
	@echo "make test          every test on the plain build; tests about arrays also on the build with bounds checks"
	@echo "make test-quick    the quick half, about 70 seconds: no clusters over sockets, no processes"
	@echo "make test-plain    every test on the plain build; PYTEST_ARGS='-k ring' selects some"
	@echo "make test-checked  the tests about arrays on the build with bounds checks"
	@echo "make test-pages    the dashboard's pages in Chromium, its API, and a real Prometheus"
	@echo "make test-chart    the Helm chart, rendered by helm"
	@echo "make test-torch    tests that need torch, Stable-Baselines3, TRL or tensordict; installs them into $$MEMOIRE_TORCH (build/torch) and build/language"
	@echo "make image         build the images of the chart, and print how to load them into a cluster; ENGINE=podman"
	@echo "make simulate      trials of a whole cluster in one thread, one for each seed: SEEDS=2000 FIRST=1; SIMULATE_ARGS='storage=rollouts'"
	@echo "make protocol      every order of events of small worlds, and what goes wrong without each rule; Spin's models"
	@echo "make soak          trials that take minutes: kills, loads, disks; written to docs/development/records/soak.md; SOAK='killed_cluster' selects some"
	@echo "make curves        the programs of examples/learning with five seeds each; takes half an hour; written to docs/development/records; CURVES_ARGS='--only ppo' runs one"
	@echo "make chart         write the chart's files that follow from values.schema.yaml, rules, boards and the version"
	@echo "make lock          pin the packages that images install (deploy/requirements); LOCK_ARGS=--upgrade: the newest versions"
	@echo "make contest       seconds until a task is learned, beside SB3, TorchRL, RLlib: PART=A GAME=breakout or space_invaders; B pendulum, hopper; C lander; D pong, pong_gpu; installs these libraries"
	@echo "make mutants       plant mistakes in copies of the code, and list those that no test finds; takes hours; written to docs/development/records/mutants.md"
	@echo "make messages      run the tests and write each text that memoire raises, logs or prints to tests/messages.txt"
	@echo "make lint          ruff, mypy, stubtest, cython-lint, codespell, structure, and English of pages"
	@echo "make bench         run benchmarks/; written to docs/development/records/"
	@echo "make bench-peers   the same beside cpprb, TorchRL, Stable-Baselines3, Reverb; installs them into build/peers: gigabytes"
	@echo "make instructions  count instructions of hot calls by valgrind, and compare with docs/development/records"
	@echo "make wheel         a wheel and a source archive in dist/; checks their contents"
	@echo "make audit         known weaknesses of the packages in .venv; says so if no database can be reached"
	@echo "make docs          the documentation as a site: search, API reference, every page; opens it in a browser"
	@echo "make site          the same without a browser, for CI; checks that each link has a target and that no page loads foreign files"
	@echo "make release       make a release in dist/release and try it, without publishing it; RELEASE='wheel arm64' selects parts"
	@echo "make clean         remove the files that the targets above made"

setup setup-dev setup-checked setup-torch setup-ppo:
	@for python in $(PYTHON) $(if $(filter file,$(origin PYTHON)),$(PYTHONS)); do \
	  $$python -c "" 2>/dev/null && exec $$python tools/setup_venv.py $(if $(filter setup,$@),run,$(@:setup-%=%)); done; \
	  echo "memoire cannot be set up: '$(PYTHON)' does not run here. Install Python 3.11 or newer" >&2; \
	  echo "(Debian, Ubuntu: sudo apt-get install python3 python3-venv python3-dev), or: make PYTHON=/path/to/python3" >&2; \
	  exit 1

demo: setup
	@$(BIN)/memoire demo $(DEMO_ARGS)

# Collectors run without torch: only the learner gets its folder.
demo-ppo: setup-ppo
	@$(BIN)/python examples/demos/ppo.py --env $(ENV) --learners $(LEARNERS) $(DEMO_ARGS)

# MuJoCo has its own folder; torch takes 1 GB, or 5 GB with CUDA's libraries.
MUJOCO ?= $(CURDIR)/build/mujoco
DEMO_SECONDS ?= 300

$(MUJOCO)/mujoco: | setup-torch
	$(BIN)/python -m pip install --quiet --target $(MUJOCO) --no-deps mujoco==4.0.0 mujoco-core==4.0.0 mujoco-studio==4.0.0 imageio glfw pyopengl absl-py etils

demo-sac: setup-torch $(MUJOCO)/mujoco
	PYTHONPATH=$(MEMOIRE_TORCH):$(MUJOCO) $(BIN)/python -m memoire.rl up examples/double_pendulum.py --seconds $(DEMO_SECONDS) --accidents --fresh --yes $(DEMO_ARGS)

test: setup-checked
	@$(MAKE) --no-print-directory test-plain
	@$(MAKE) --no-print-directory test-checked

test-quick: setup-dev
	$(BIN)/pytest $(QUICK_WORKERS) -m "not slow" $(PYTEST_ARGS)

test-plain: setup-dev
	$(BIN)/pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Clusters of processes take minutes and show nothing more about the bounds of arrays. The same holds for the files that
# conftest.py names.
test-checked: setup-checked
	$(CHECKED) $(BIN)/python -P -m pytest $(PYTEST_WORKERS) -m "not processes" $(PYTEST_ARGS)

# Without Chromium or Prometheus these tests are skipped, or fail if CI=true. Debian: packages chromium and prometheus.
test-pages: setup-dev
	$(BIN)/pytest $(PYTEST_WORKERS) -m browser $(PYTEST_ARGS)

# MEMOIRE_HELM lists helm programs that are not on PATH, separated by colons. Without helm, two versions are fetched
# into build/helm.
test-chart: setup-dev
	MEMOIRE_HELM="$${MEMOIRE_HELM:-$$(command -v helm || $(BIN)/python tools/get_helm.py)}" \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -m chart $(PYTEST_ARGS)

# TRL and tensordict, with their requirements except torch: 0.5 GB.
LANGUAGE ?= $(CURDIR)/build/language

$(LANGUAGE)/trl: tests/frameworks/requirements.txt | setup-torch
	$(BIN)/python -m pip install --quiet --upgrade --target $(LANGUAGE) --no-deps -r tests/frameworks/requirements.txt
	touch $(LANGUAGE)/trl

# PYTHONPATH puts torch before the packages of .venv. The target fails if torch cannot be installed. OMP_NUM_THREADS=1:
# torch's threads in several workers would wait for each other.
test-torch: setup-torch $(LANGUAGE)/trl
	PYTHONPATH=$(MEMOIRE_TORCH):$(LANGUAGE) OMP_NUM_THREADS=1 $(BIN)/pytest $(QUICK_WORKERS) -m torch $(PYTEST_ARGS)

# A failing seed prints its shortest schedule that still fails, and the command that repeats it.
simulate: setup-dev
	cd tests && PYTHONPATH=.:support PYTHONHASHSEED=0 $(CURDIR)/$(BIN)/python -m simulation.run --seeds $(SEEDS) --first $(FIRST) $(SIMULATE_ARGS)

# Plants each fault in turn, and prints after how many seeds it is found.
simulate-plants: setup-dev
	cd tests && PYTHONPATH=.:support PYTHONHASHSEED=0 $(CURDIR)/$(BIN)/python -m simulation.find --seeds $(SEEDS) $(SIMULATE_ARGS)

# All orders of events of small worlds, with the product's classes that decide. Then Spin's models, if it is installed.
protocol: setup-dev
	cd tests && PYTHONPATH=.:support PYTHONHASHSEED=0 $(CURDIR)/$(BIN)/python -m protocol.run $(PROTOCOL_ARGS)
	cd tests && PYTHONPATH=.:support $(CURDIR)/$(BIN)/python -m protocol.spin

soak: setup-dev
	$(BIN)/python tests/soak/_run.py --write docs/development/records/soak.md $(SOAK)

# An interrupted run continues. MUTANTS_ARGS=--again repeats the mistakes that were not found; --only=WORD selects some.
mutants: setup-dev
	$(BIN)/python tests/mutants/run.py --write docs/development/records/mutants.md $(MUTANTS_ARGS)

# What a run records is added; remove build/messages to begin again. PYTEST_ARGS='-m torch' records other tests.
MESSAGES := $(CURDIR)/build/messages

messages: setup-dev
	mkdir -p $(MESSAGES)
	-MEMOIRE_MESSAGES=$(MESSAGES) PYTHONPATH=$(CURDIR)/tests/mutants/child:$(CURDIR)/tests/support $(BIN)/pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)
	MEMOIRE_MESSAGES=$(MESSAGES) $(BIN)/python tests/support/messagekit.py --write

lint: setup-dev
	@$(MAKE) --no-print-directory --keep-going $(LINTS)

lint-ruff:
	$(BIN)/ruff check .

lint-format:
	$(BIN)/ruff format --check .

lint-types:
	$(BIN)/mypy

lint-stubs:
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml memoire._core memoire.net._multipart memoire.wire._bytes memoire.wire._container memoire.tables.caches._draw

lint-cython:
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint memoire

lint-spelling:
	$(BIN)/codespell

lint-english:
	$(BIN)/python tools/english.py --check

lint-imports:
	$(BIN)/pytest tests/structure/test_imports.py

lint-structure:
	$(BIN)/python tools/structure.py --check

lint-chart:
	$(BIN)/python tools/chart.py --check

lint-pictures:
	$(BIN)/python tools/pictures.py --check

docs: setup
	$(BIN)/python tools/docs_site.py --open

site: setup
	$(BIN)/python tools/docs_site.py

pictures: setup
	$(BIN)/python tools/pictures.py

# The release names parts that this machine cannot make, and does not fail for them.
release: setup-dev
	$(BIN)/python tools/release.py $(RELEASE)

image:
	$(PYTHON) tools/image.py --engine $(ENGINE)

structure: setup-dev
	$(BIN)/python tools/structure.py --draw docs/development/structure.svg

chart: setup-dev
	$(BIN)/python tools/chart.py

lock: setup
	$(BIN)/python tools/lock.py $(LOCK_ARGS)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev
	$(BIN)/python benchmarks/core.py --write docs/development/records
	$(BIN)/python benchmarks/wire.py --write docs/development/records
	$(BIN)/python benchmarks/waiting.py --write docs/development/records
	$(BIN)/python benchmarks/farlearner.py --write docs/development/records
	$(BIN)/python benchmarks/feedback.py --write docs/development/records
	$(BIN)/python benchmarks/storage.py --write docs/development/records
	$(BIN)/python benchmarks/frames.py --write docs/development/records
	$(BIN)/python benchmarks/scaling.py --write docs/development/records
	$(BIN)/python benchmarks/cliffwalk.py --seeds 3 --write docs/development/records
	$(BIN)/python benchmarks/trainer.py --write docs/development/records

curves: setup-torch
	PYTHONPATH=$(MEMOIRE_TORCH) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/curves.py --write docs/development/records $(CURVES_ARGS)

# Runs recorded in build/contest are not repeated; CONTEST_ARGS="--seeds 5 --sides memoire,sb3" adds further ones.
contest: setup-torch
	$(BIN)/python benchmarks/contest.py --part $(PART) --game $(GAME) --write docs/development/records $(CONTEST_ARGS)

# benchmarks/peers/versions.toml lists the libraries and their versions; with torch and TensorFlow they take gigabytes.
bench-peers: setup-dev
	$(BIN)/python benchmarks/learner.py --write docs/development/records
	$(BIN)/python tools/pictures.py
	$(BIN)/python benchmarks/endtoend.py --write docs/development/records
	$(BIN)/python benchmarks/inference.py --write docs/development/records
	$(BIN)/python benchmarks/onpolicy.py --write docs/development/records
	$(BIN)/python benchmarks/transfer.py --write docs/development/records

# Without valgrind (Debian, Ubuntu: apt-get install valgrind), the target says so and exits with 77.
instructions: setup-dev
	$(BIN)/python benchmarks/instructions.py

wheel: setup
	@rm -rf dist build/lib*
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	$(BIN)/python setup.py --quiet sdist --dist-dir dist
	@ls dist/memoire_rl-*-cp311-abi3-*.whl dist/memoire_rl-*.tar.gz
	$(BIN)/python tools/package_contents.py dist/*.whl dist/*.tar.gz

audit: setup-dev
	$(BIN)/python tools/audit.py $(AUDIT_ARGS)

clean:
	rm -rf .venv .venv.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find memoire -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
