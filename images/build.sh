#!/usr/bin/env bash
# Build the trainer image and, on it, the component image; try both; push them if asked to.
#
#   BASE=python:3.11-slim   any image with Python 3.11 and pip; name a digest to pin it for good
#   REGISTRY=               where the images belong, e.g. registry.example/team
#   TAG=                    else the package's version
#   PUSH=1                  push them
#   DOCKER=docker           or podman; what is installed by default
#   COMPILER=1              install g++ where the base has none; empty: leave the base as it is
#   HASHES=1                install only files whose hashes are in images/locks; empty: any of the tested versions
#   PIP_CONF=, PIP_CA=      a pip.conf and a CA bundle (named there as /run/secrets/ca) for the build only
#
# Arguments go to the builder: images/build.sh --network=host
set -euo pipefail
cd "$(dirname "$0")/.."

docker=${DOCKER:-$(command -v docker || command -v podman || true)}
[[ -n $docker ]] || { echo "error: neither docker nor podman is installed" >&2; exit 2; }
export DOCKER_BUILDKIT=1

version=$(sed -nE 's/^version = "(.*)"$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || revision+=-modified
tag=${TAG:-$version}
trainer=${REGISTRY:+$REGISTRY/}kubedet-trainer:$tag
component=${REGISTRY:+$REGISTRY/}kubedet-component:$tag

secrets=()  # Expanded below so that an empty list is no error in Bash before 4.4 either.
[[ -z ${PIP_CONF:-} ]] || secrets+=(--secret "id=pipconf,src=$PIP_CONF")
[[ -z ${PIP_CA:-} ]] || secrets+=(--secret "id=ca,src=$PIP_CA")

digest() { # of an image, as a registry knows it; of one that was never in a registry, its id
  local known
  known=$("$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" 2>/dev/null | sed -n 's/.*@//p')
  [[ -n $known ]] || known=$("$docker" image inspect --format '{{.Id}}' "$1" 2>/dev/null || echo unknown)
  echo "${known%%$'\n'*}"
}

build() { # Dockerfile, base image, name of the image, options of the builder
  "$docker" build -f "images/$1" --build-arg "BASE=$2" --build-arg "VERSION=$version" \
    --build-arg "REVISION=$revision" --build-arg "BASE_DIGEST=$(digest "$2")" --build-arg "HASHES=${HASHES-1}" ${secrets[@]+"${secrets[@]}"} -t "$3" "${@:4}" .
}

try() { # as a cluster may run it: any user, nothing writable but /tmp
  "$docker" run --rm --network=none --read-only --tmpfs /tmp --user 2000:2000 "$1" python -m trainer --help >/dev/null
}

base=${BASE:-python:3.11-slim}
# Here before the build begins, so that its record names what it is built on; where it cannot be had, the build says why.
"$docker" image inspect "$base" >/dev/null 2>&1 || "$docker" pull "$base" >/dev/null || true

build trainer.Dockerfile "$base" "$trainer" --build-arg "COMPILER=${COMPILER-1}" "$@"
try "$trainer"
build component.Dockerfile "$trainer" "$component" "$@"
try "$component"

if [[ ${PUSH:-} == 1 ]]; then
  "$docker" push "$trainer"
  "$docker" push "$component"
fi
echo "base image:      $base $(digest "$base")"
echo "trainer image:   $trainer"
echo "component image: $component"
