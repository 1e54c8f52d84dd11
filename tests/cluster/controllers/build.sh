# The controllers' programs: sources from Go modules, compiled once and kept in the cache. Sourced by up.sh.

module() { # path@version, name: a writable copy of a module's source, and every module it is built of
  local copy=$cache/source/$2-${1##*@} found
  [[ -e $copy/.complete ]] && return
  say "fetch $1"
  rm -rf "$copy"
  mkdir -p "$copy"
  # The checksum database does not know all of these modules.
  found=$(cd / && GONOSUMDB="${1%@*}" "$go" mod download -json "$1" | sed -nE 's/^\t"Dir": "(.*)",?$/\1/p')
  cp -r "$found/." "$copy"
  chmod -R u+w "$copy"
  [[ $2 != kueue ]] || (cd "$copy" && "$go" mod edit -require="github.com/kubeflow/trainer/v2@$trainer")
  touch "$copy/.complete"
}

compile() { # name, version, package
  local output=$cache/bin/$1-$2
  [[ -x $output ]] && return
  say "build $1 $2"
  mkdir -p "$cache/bin"
  (cd "$cache/source/$1-$2" && CGO_ENABLED=0 GOWORK=off GOFLAGS=-mod=mod \
    GONOSUMDB='github.com/kubeflow/*,sigs.k8s.io/*' \
    nice -n 15 "$go" build -p 2 -trimpath -ldflags '-s -w' -o "$output.part" "$3")
  mv "$output.part" "$output"
}

build() {
  go=$(tool GO go)
  module "sigs.k8s.io/jobset@$jobset" jobset
  module "github.com/kubeflow/trainer/v2@$trainer" trainer
  module "sigs.k8s.io/kueue@$kueue" kueue # with the Trainer that runs here: it puts a TrainJob's pods together itself
  compile jobset "$jobset" .
  compile trainer "$trainer" ./cmd/trainer-controller-manager
  compile kueue "$kueue" ./cmd/kueue
}
