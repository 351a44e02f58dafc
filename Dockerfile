# One image with every role of memoire, and a small one for actors that users build theirs from.
#
#     docker build --tag memoire .                          server, proxy, relay, dashboard, doctor, ... by command
#     docker build --tag memoire-actor --target actor .     numpy, pyzmq, msgspec and memoire; nothing else
#     docker build --tag memoire-demo --target demo .       and Gymnasium: python3 -m memoire.rl.demo.actor | learner
#
# All run as user 10001 with a root file system that nobody can write to, and hold no compiler. What is installed is what
# deploy/requirements names, by version and hash: `make lock`. The Python may be any that memoire takes: --build-arg
# PYTHON_VERSION=3.13.

ARG PYTHON_VERSION=3.11

# ---------------------------------------------------------------------------------------------------------- the wheel
FROM python:${PYTHON_VERSION}-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY deploy/requirements/build.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /build && /build/bin/pip install --quiet --require-hashes --only-binary :all: -r /build.txt
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY dashboard dashboard
COPY memoire memoire
RUN /build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

# Environments are made where there is no compiler: whatever does not come as a wheel, or is not what its hash says, stops
# the build here. They have no pip of their own; code is compiled now, since nobody can write it later, and trusted whatever
# the files' times are.
FROM python:${PYTHON_VERSION}-slim-bookworm AS environments
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY --from=build /wheels /wheels
COPY deploy/requirements /requirements
RUN --mount=type=cache,target=/root/.cache/pip <<RUN
set -eu
make_environment() {  # FOLDER REQUIREMENTS
  python3 -m venv --without-pip "$1"
  pip="pip --python $1/bin/python --quiet"
  $pip install --no-compile --only-binary :all: --require-hashes -r "/requirements/$2.txt"
  $pip install --no-compile --no-deps /wheels/memoire_rl-*.whl
  $pip check
  "$1/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$1/lib"
}
make_environment /actor/opt/memoire actor
make_environment /all/opt/memoire all
sed -i 's|/actor/opt/memoire|/opt/memoire|; s|/all/opt/memoire|/opt/memoire|' /a*/opt/memoire/bin/* /a*/opt/memoire/pyvenv.cfg
RUN

# What is in each of them, as CycloneDX.
FROM python:${PYTHON_VERSION}-slim-bookworm AS lists
COPY deploy/requirements/sbom.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/sbom && /opt/sbom/bin/pip install --quiet --require-hashes --only-binary :all: -r /sbom.txt
COPY --from=environments /actor/opt/memoire /actor
COPY --from=environments /all/opt/memoire /all
RUN /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /actor.cdx.json /actor/bin/python \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /all.cdx.json /all/bin/python

# ----------------------------------------------------------------------------------------------------- what both are
FROM python:${PYTHON_VERSION}-slim-bookworm AS base
ENV PATH=/opt/memoire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PIP_PYTHON=/opt/memoire/bin/python
LABEL org.opencontainers.image.title="memoire" \
      org.opencontainers.image.description="A distributed prioritized replay memory for reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
STOPSIGNAL SIGTERM

# ------------------------------------------------------------------------------------------------- for users' actors
# FROM memoire-actor, then: USER 0, RUN pip install ..., USER 10001:0. PIP_PYTHON has pip install beside memoire.
FROM base AS actor
COPY --from=environments /actor/opt/memoire /opt/memoire
COPY --from=lists /actor.cdx.json /usr/share/sbom/memoire.cdx.json
USER 10001:0
CMD ["python3"]

# ---------------------------------------------------------------- the demo's actors and learner, as an example of that
FROM actor AS demo
USER 0
COPY deploy/requirements/demo.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --quiet --require-hashes --only-binary :all: -r /tmp/demo.txt && rm /tmp/demo.txt
USER 10001:0
CMD ["python3", "-m", "memoire.rl.demo.actor", "--help"]

# -------------------------------------------------------------------------------------------------------- every role
FROM base AS memoire
COPY --from=environments /all/opt/memoire /opt/memoire
COPY --from=lists /all.cdx.json /usr/share/sbom/memoire.cdx.json
USER 10001:0
ENTRYPOINT ["memoire"]
CMD ["--help"]
