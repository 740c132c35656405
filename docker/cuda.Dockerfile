# StreamRL on CUDA devices. The wheels of torch and vLLM bring CUDA along, so the machine needs only NVIDIA's driver and
# its container toolkit. From the root of a clone:
#   docker build --file docker/cuda.Dockerfile --tag streamrl:cuda .
FROM python:3.12-slim-bookworm

# Triton compiles kernels while it runs, so the compiler stays; KubeRay asks with wget whether a pod is alive; Debian keeps
# only the newest version of a package
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/streamrl
COPY . .
# this clone is what is installed, so there is no version to name
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir ".[gpu,tasks,dashboard,kuberay]" \
    && useradd --create-home --uid 1000 streamrl \
    && install --directory --owner streamrl /work

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["streamrl"]
CMD ["--help"]
