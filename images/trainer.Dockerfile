# The image of the training pods: trainer without kfp. Built from the repository's root.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/kubedet
# Dependencies first: a change of the code does not install them again.
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir trainer components pipelines && touch trainer/__init__.py components/__init__.py pipelines/__init__.py \
    && pip install -c constraints.txt '.[export]' && pip uninstall -y kubedet
COPY trainer trainer
COPY components components
COPY pipelines pipelines
RUN pip install --no-deps .

RUN useradd --uid 1000 --create-home kubedet
USER 1000:1000
WORKDIR /home/kubedet
CMD ["python", "-m", "trainer", "--help"]
