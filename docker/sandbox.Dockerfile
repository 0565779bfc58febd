# A sandbox for agents, made of Debian packages only. Any other image works too.
# A build from one state of Debian: --build-arg BASE=debian@sha256:… (docs/security.md).
ARG BASE=debian:bookworm-slim
FROM $BASE

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bash build-essential ca-certificates curl file git jq less make patch procps python3 python3-pip python3-pytest \
        python3-venv ripgrep sqlite3 tree unzip vim-tiny xz-utils \
    && rm -rf /var/lib/apt/lists/*
