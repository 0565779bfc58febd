# CRIU from Debian's package. trixie has 4.1, which works with kernels since 6.x; bookworm's 3.17 does not.
FROM debian:trixie-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends criu \
    && rm -rf /var/lib/apt/lists/*
