# Stand-ins for images that the tests can't pull: Debian's packages of the same programs.
ARG BASE_IMAGE
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
