#!/usr/bin/env bash
# Build the trainer image and, on it, the component image. The tag is the package's version.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v docker >/dev/null || { echo "error: docker is not installed; any builder of Dockerfiles does: see images/" >&2; exit 2; }
tag=$(sed -nE 's/^version = "(.*)"$/\1/p' pyproject.toml)
base=${BASE:-python:3.11-slim-bookworm}
docker build -f images/trainer.Dockerfile --build-arg "BASE=$base" -t "kubedet-trainer:$tag" .
docker build -f images/component.Dockerfile --build-arg "BASE=kubedet-trainer:$tag" -t "kubedet-component:$tag" .
