# The image of the training pods: `python -m trainer`, without kfp. Build it with images/build.sh.
#
# BASE is any image with Python 3.11 or newer and pip. A torch that it brings is kept: see plan.py.
# Two optional build secrets reach pip and stay out of the image: `pipconf` (a pip.conf, for an
# index of one's own) and `ca` (a CA bundle, which that pip.conf names as /run/secrets/ca).
ARG BASE=python:3.11-slim

FROM ${BASE} AS plan
USER root
COPY pyproject.toml constraints.txt images/plan.py images/locks/trainer.txt /src/
# Empty: an index of one's own has other files under the same versions, as PyTorch's for a CPU.
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
# Empty: what the base has must do. The build then needs no package mirror of the operating system.
ARG COMPILER=1
RUN --mount=type=bind,source=images/compiler.sh,target=/compiler.sh \
    if [ -n "${COMPILER}" ]; then sh /compiler.sh; fi

# A virtual environment over the base's packages: it may add and shadow, and leaves the base as it is,
# be it Debian's Python, conda's or one that refuses pip (PEP 668).
RUN python3 -m venv --without-pip --system-site-packages /opt/kubedet
# PIP_CONSTRAINT: some bases pin half of PyPI with it.
ENV PATH=/opt/kubedet/bin:${PATH} PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# From the largest and steadiest layer to the smallest: nodes pull only what changed.
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/torch.txt,target=/plan/torch.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install --no-deps -r /plan/torch.txt
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/packages.txt,target=/plan/packages.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install --no-deps -r /plan/packages.txt
# Without an index, unless the base has a torch that more must fit: it sees that nothing lacks.
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan,target=/plan \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install -c /plan/constraints.txt -r /plan/requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python -m pip install --no-index --no-deps /wheel/*.whl

# The list of fonts, which every pod that draws would make anew, in a second or two. Writable for whoever the
# pod runs as: matplotlib ignores a folder that it cannot write.
ENV MPLCONFIGDIR=/opt/kubedet/matplotlib
RUN mkdir ${MPLCONFIGDIR} && python -c "import matplotlib.font_manager" && chmod -R a+rwX ${MPLCONFIGDIR}

# HOME and USER: a pod may run as any user id, which has no entry in /etc/passwd; with a read-only
# root file system, caches can only go to /tmp.
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
