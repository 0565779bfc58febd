# CRIU from Debian's package. trixie has 4.1, which works with kernels since 6.x; bookworm's 3.17 does not.
# A build from one state of Debian: --build-arg BASE=debian@sha256:… (docs/security.md).
ARG BASE=debian:trixie-slim
FROM $BASE

RUN apt-get update \
    && apt-get install -y --no-install-recommends criu \
    && rm -rf /var/lib/apt/lists/*
