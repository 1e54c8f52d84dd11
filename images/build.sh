#!/usr/bin/env bash
# Build the trainer image and, based on it, the component image; test both, and push them with PUSH=1.
#
#   BASE=python:3.11-slim   any image with Python 3.11 or newer and pip; use a digest to pin it
#   REGISTRY=               registry of the images, e.g. registry.example/team
#   TAG=                    tag of the images (default: the package's version)
#   PUSH=1                  push the images
#   DOCKER=docker           docker or podman (default: whichever is installed)
#   COMPILER=1              install g++ if the base image has none; empty: never install it
#   HASHES=1                install only files with the hashes in images/locks; empty: only check versions
#   PIP_CONF=, PIP_CA=      a pip.conf and a CA bundle (/run/secrets/ca in that file) for the build only
#
# Arguments are passed to the builder, e.g. images/build.sh --network=host
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

secrets=()  # Expanded below in a way that also works for an empty list in Bash before 4.4.
[[ -z ${PIP_CONF:-} ]] || secrets+=(--secret "id=pipconf,src=$PIP_CONF")
[[ -z ${PIP_CA:-} ]] || secrets+=(--secret "id=ca,src=$PIP_CA")

digest() { # Print the registry digest of an image, or its ID if it was never in a registry.
  local digests
  digests=$("$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" 2>/dev/null | sed -n 's/.*@//p')
  [[ -n $digests ]] || digests=$("$docker" image inspect --format '{{.Id}}' "$1" 2>/dev/null || echo unknown)
  echo "${digests%%$'\n'*}"
}

build() { # Arguments: Dockerfile, base image, name of the image, options of the builder.
  "$docker" build -f "images/$1" --build-arg "BASE=$2" --build-arg "VERSION=$version" \
    --build-arg "REVISION=$revision" --build-arg "BASE_DIGEST=$(digest "$2")" --build-arg "HASHES=${HASHES-1}" ${secrets[@]+"${secrets[@]}"} -t "$3" "${@:4}" .
}

try() { # Start the image as in a restricted cluster: any user, and only /tmp is writable.
  "$docker" run --rm --network=none --read-only --tmpfs /tmp --user 2000:2000 "$1" python -m trainer --help >/dev/null
}

base=${BASE:-python:3.11-slim}
# Pull the base image before the build, to record its digest. If that fails, the build reports the error.
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
