# An image for a GPU, and one for a processor alone (docs/install.md):
#
#     docker build --tag triforce-offload .
#     docker build --target cpu --tag triforce-offload:cpu .

# The tests run with this version.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY setup.py pyproject.toml MANIFEST.in constraints.txt README.md CHANGELOG.md CITATION.cff LICENSE NOTICE.md ./
COPY scripts/packages.sh scripts/
COPY kernels kernels
COPY offload offload
COPY triforce_core triforce_core
RUN . scripts/packages.sh && build_packages python /source /wheels

FROM python:${PYTHON}-slim AS base
ENV HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    TRIFORCE_HOST=0.0.0.0 \
    TRIFORCE_PORT=8080 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN useradd --create-home --uid 1000 triforce \
    && install --directory --owner triforce --group triforce /cache
COPY --from=build /source/constraints.txt /source/scripts/packages.sh /wheels/*.whl /install/
# Downloaded models, draft copies of layers and compiled kernels.
VOLUME /cache
WORKDIR /home/triforce
EXPOSE 8080
# The server ends the requests that it serves, within 10 seconds.
STOPSIGNAL SIGTERM
# 503 while a model loads, which does not count within the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=1h --retries=3 CMD [ \
    "python", "-c", \
    "import http.client, os, sys; \
server = http.client.HTTPConnection('127.0.0.1', int(os.environ['TRIFORCE_PORT']), timeout=4); \
server.request('GET', '/health'); answer = server.getresponse(); \
print(answer.read().decode()); sys.exit(answer.status != 200)"]
# A server on an address that others reach needs TRIFORCE_API_KEY.
ENTRYPOINT ["triforce"]
CMD ["serve", "/model"]

FROM base AS cpu
# PyPI's PyTorch for Linux brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN . /install/packages.sh \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" install_wheel python /install/constraints.txt /install/*.whl
USER triforce

FROM base AS cuda
# Triton compiles what launches its kernels when it first runs one.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# PyTorch's wheels bring CUDA. The driver comes from the host.
RUN . /install/packages.sh \
    && install_wheel python /install/constraints.txt /install/*.whl
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER triforce
