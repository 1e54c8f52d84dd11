# The image of the training pods: `python -m trainer`, without kfp. Build it with images/build.sh.
#
# BASE may be any image with Python 3.11 or newer and pip. If it contains torch, that is kept: see plan.py.
# Two optional build secrets are used by pip and are not stored in the image: `pipconf` (a pip.conf, for a
# private package index) and `ca` (a CA bundle, to which that pip.conf refers as /run/secrets/ca).
ARG BASE=python:3.11-slim

FROM ${BASE} AS plan
USER root
COPY pyproject.toml constraints.txt images/plan.py images/locks/trainer.txt /src/
# Set it to empty if your package index has other files for the same versions, e.g. PyTorch's CPU index.
ARG HASHES=1
RUN python3 /src/plan.py --project /src --output /plan --lock /src/trainer.txt --hashes "${HASHES}" --extras pod,mlflow,wandb,detr

FROM ${BASE} AS wheel
USER root
COPY pyproject.toml README.md LICENSE /src/
COPY deploy /src/deploy
COPY kubedet /src/kubedet
COPY trainer /src/trainer
COPY components /src/components
COPY operations /src/operations
COPY pipelines /src/pipelines
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/build.txt,target=/plan/build.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf PIP_CONSTRAINT= \
    python3 -m pip install --no-cache-dir --no-deps --target /build -r /plan/build.txt && PYTHONPATH=/build \
    python3 -m pip wheel --no-index --no-build-isolation --no-cache-dir --no-deps --wheel-dir /wheel /src

FROM ${BASE}
USER root
# Set it to empty to use only the compiler of the base image; the build then needs no package mirror.
ARG COMPILER=1
RUN --mount=type=bind,source=images/compiler.sh,target=/compiler.sh \
    if [ -n "${COMPILER}" ]; then sh /compiler.sh; fi

# A virtual environment that can use and override the base's packages without changing them. It works with
# Debian's Python, with conda, and if pip may not install into the base (PEP 668).
RUN python3 -m venv --without-pip --system-site-packages /opt/kubedet
# PIP_CONSTRAINT is unset because some base images pin many packages with it.
ENV PATH=/opt/kubedet/bin:${PATH} PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The largest layers, which rarely change, come first: nodes pull only the layers that changed.
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/torch.txt,target=/plan/torch.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install --no-deps -r /plan/torch.txt
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/packages.txt,target=/plan/packages.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install --no-deps -r /plan/packages.txt
# Checks that no requirement is missing, and installs a torchvision that fits the base's torch if needed.
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan,target=/plan \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install -c /plan/constraints.txt -r /plan/requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python -m pip install --no-index --no-deps /wheel/*.whl

# Build matplotlib's font cache now: otherwise every pod that draws would spend one or two seconds on it. All
# users may write to the folder, because matplotlib ignores a folder that is not writable.
ENV MPLCONFIGDIR=/opt/kubedet/matplotlib
RUN mkdir ${MPLCONFIGDIR} && python -c "import matplotlib.font_manager" && chmod -R a+rwX ${MPLCONFIGDIR}

# HOME and USER are set because a pod may run as a user ID that is not in /etc/passwd. With a read-only root
# file system, only /tmp is available for caches.
ENV HOME=/tmp USER=kubedet PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /tmp
RUN --mount=type=tmpfs,target=/tmp --mount=type=bind,source=images/check.py,target=/check.py \
    python /check.py --extras pod,mlflow,wandb,detr

ARG BASE VERSION=0 REVISION=unknown BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="kubedet-trainer" \
      org.opencontainers.image.description="Training pods of kubedet: python -m trainer" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
ENTRYPOINT []
CMD ["python", "-m", "trainer", "--help"]
