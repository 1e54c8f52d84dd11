#!/bin/sh
# Install a C++ compiler and Python's headers where the base has none, as its package manager knows them.
#
# torch.compile needs them when a training starts: without, the loss takes several times as long, on a
# CPU and on a GPU, whose Triton builds the launchers of its kernels with gcc.
set -eu

packages=
command -v g++ >/dev/null || packages=g++
header=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
# Only an operating system's own Python comes without them.
[ -e "$header" ] || packages="$packages python3-dev"
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "error: the base has no $packages and no apt-get to install it: put it into the base, or build" \
    "with COMPILER= (an image that trains with the slower, uncompiled loss)" >&2
  exit 1
fi
apt-get update
# shellcheck disable=SC2086  # names of packages, parted by spaces
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
