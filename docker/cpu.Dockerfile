# StreamRL on CPUs, with the packages of locks/cpu.txt. From the root of a clone:
#   docker build --file docker/cpu.Dockerfile --tag streamrl:cpu .
FROM python:3.12-slim-bookworm

# torch and vLLM compile kernels while they run, so the compiler stays; Debian keeps only the newest version of a package
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/streamrl
COPY . .
RUN python tools/install.py --venv /opt/venv --lock locks/cpu.txt \
    && useradd --create-home --uid 1000 streamrl \
    && install --directory --owner streamrl /work

ENV PATH=/opt/venv/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["streamrl"]
CMD ["--help"]
