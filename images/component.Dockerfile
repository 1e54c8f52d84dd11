# The image of the pipeline's steps: the trainer image, with kfp, Kubernetes' client and ONNX.
# Build it with images/build.sh. It has the same build secrets as the trainer image.
ARG BASE=kubedet-trainer:0.2.0

FROM ${BASE} AS plan
USER root
COPY pyproject.toml constraints.txt images/plan.py images/locks/component.txt /src/
# Set it to empty if your package index has other files for the same versions, e.g. PyTorch's CPU index.
ARG HASHES=1
RUN python3 /src/plan.py --project /src --output /plan --lock /src/component.txt --hashes "${HASHES}" --extras client,pod,export,signing,registry,mlflow,wandb,detr,tune

FROM ${BASE}
USER root
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan/packages.txt,target=/plan/packages.txt \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install --no-deps -r /plan/packages.txt
# Without an index: checks that no requirement is missing.
RUN --mount=type=secret,id=pipconf --mount=type=secret,id=ca \
    --mount=type=bind,from=plan,source=/plan,target=/plan \
    PIP_CONFIG_FILE=/run/secrets/pipconf python -m pip install -c /plan/constraints.txt -r /plan/requirements.txt

USER 1000:1000
RUN --mount=type=tmpfs,target=/tmp --mount=type=bind,source=images/check.py,target=/check.py \
    python /check.py --extras client,pod,export,signing,registry,mlflow,wandb,detr,tune

ARG BASE VERSION=0 REVISION=unknown BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="kubedet-component" \
      org.opencontainers.image.description="Pipeline steps of kubedet" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
CMD ["kubedet", "--help"]
