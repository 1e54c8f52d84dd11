#!/bin/sh
# Install a C++ compiler and Python's headers with apt-get if the base image has none.
#
# torch.compile needs them when training starts; without it, the loss takes several times as long. On GPUs,
# Triton needs gcc to build the launchers of its kernels.
set -eu

packages=
command -v g++ >/dev/null || packages=g++
header=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
# Only the operating system's Python comes without headers.
[ -e "$header" ] || packages="$packages python3-dev"
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "error: the base has no $packages and no apt-get to install it: add it to the base image, or build" \
    "with COMPILER= (an image that trains with the slower, uncompiled loss)" >&2
  exit 1
fi
apt-get update
# shellcheck disable=SC2086  # names of packages, separated by spaces
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
