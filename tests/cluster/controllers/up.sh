#!/usr/bin/env bash
# Build JobSet, Kubeflow Trainer and Kueue from their Go modules and run them on a test cluster. See ../README.md.
#
#   up.sh [build|jobset|trainer|kueue|queues]...    all if none is named
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CONTROLLERS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kubedet-controllers}

jobset=${JOBSET_VERSION:-v0.12.0}
trainer=${TRAINER_VERSION:-v2.3.0}
kueue=${KUEUE_VERSION:-v0.19.2}
jobs=${KUEUE_JOBS-trainjob}         # whose jobs Kueue queues: trainjob, pytorchjob, both or none

. "$here/build.sh"

say() { echo "$(date +%T) $*"; }
die() { echo "error: $*" >&2; exit 1; }
tool() { # variable, program: the program, by its name on PATH or as the variable says
  local named=${!1:-$2}
  command -v "$named" >/dev/null || die "no $2 on PATH: install it, or say in $1 where it is"
  echo "$named"
}

image() { # name, version: brings the program's image onto the node
  local program=$cache/bin/$1-$2 archive=$cache/$1-$2.tar
  [[ -x $program ]] || die "$1 $2 is not built: up.sh build"
  [[ -n ${LOAD:-} ]] || die "say in LOAD how the node takes an image archive, e.g. LOAD='ctr -n k8s.io images import'"
  "$python" "$here/archive.py" "$program" "localhost/$1:$2" "$archive"
  bash -c "$LOAD \"\$1\"" load "$archive" >/dev/null || die "the image was not loaded: $LOAD $archive"
  rm "$archive"
}

manager() { # name, version, deployment: requests that leave room on a small node, an image that is never pulled
  cat <<YAML
- target: {kind: Deployment, name: $3}
  patch: |
    - {op: add, path: /spec/strategy, value: {type: Recreate}}
    - {op: add, path: /spec/template/spec/containers/0/image, value: "localhost/$1:$2"}
    - {op: add, path: /spec/template/spec/containers/0/imagePullPolicy, value: Never}
    - {op: add, path: /spec/template/spec/containers/0/resources, value: {requests: {cpu: 10m, memory: 64Mi}}}
YAML
}

deploy() { # folder of a kustomization, namespace, deployment
  "$kubectl" apply --server-side --force-conflicts --field-manager kubedet-controllers -k "$1" >"$cache/apply.log" ||
    die "not applied: $1"
  "$kubectl" -n "$2" rollout status "deployment/$3" --timeout=300s
}

overlay() { # folder: makes it and begins its kustomization
  mkdir -p "$1"
  printf 'apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n' >"$1/kustomization.yaml"
  cat >>"$1/kustomization.yaml"
}

jobset() {
  local folder=$cache/source/jobset-$jobset/config/kubedet
  image jobset "$jobset"
  overlay "$folder" <<YAML
resources: [../default]
patches:
$(manager jobset "$jobset" jobset-controller-manager)
YAML
  deploy "$folder" jobset-system jobset-controller-manager
}

trainer() {
  local folder=$cache/source/trainer-$trainer/manifests/overlays/kubedet
  image trainer "$trainer"
  overlay "$folder" <<YAML
namespace: kubeflow-system
resources: [namespace.yaml, ../../base/crds, ../../base/manager, ../../base/rbac, ../../base/webhook]
generatorOptions: {disableNameSuffixHash: true}
secretGenerator: [{name: kubeflow-trainer-webhook-cert}]
configMapGenerator: [{name: kubeflow-trainer-public, literals: [kubeflow_trainer_version=$trainer]}]
patches:
$(manager trainer "$trainer" kubeflow-trainer-controller-manager)
YAML
  printf 'apiVersion: v1\nkind: Namespace\nmetadata: {name: kubeflow-system}\n' >"$folder/namespace.yaml"
  deploy "$folder" kubeflow-system kubeflow-trainer-controller-manager
}

kueue_webhooks() { # kind, prefix, manifest: patch that leaves those of Kueue's own kinds, of TrainJobs, of queued PyTorchJobs
  local name
  printf -- '- patch: |\n    apiVersion: admissionregistration.k8s.io/v1\n    kind: %s\n' "$1"
  printf '    metadata: {name: kueue-%s-webhook-configuration}\n    webhooks:\n' "$2"
  for name in $(sed -nE "s/^  name: (${2:0:1}[a-z]+)\.kb\.io$/\1/p" "$3"); do
    case ${name:1} in
      clusterqueue | cohort | resourceflavor | workload | trainjob) ;;
      pytorchjob) cat <<YAML ;;
    - name: $name.kb.io
      objectSelector: {matchExpressions: [{key: kueue.x-k8s.io/queue-name, operator: Exists}]}
YAML
      *) printf '    - {name: %s.kb.io, $patch: delete}\n' "$name" ;;
    esac
  done
}

kueue() {
  local base=$cache/source/kueue-$kueue/config name frameworks=()
  local folder=$base/kubedet hooks=$base/components/webhook/manifests.yaml
  for name in $jobs; do
    case $name in
      trainjob) frameworks+=(trainer.kubeflow.org/trainjob) ;;
      pytorchjob) frameworks+=(kubeflow.org/pytorchjob) ;;
      *) die "KUEUE_JOBS names trainjob and pytorchjob, not $name" ;;
    esac
  done
  ((${#frameworks[@]})) || frameworks=(kubeflow.org/mpijob) # none would mean Kueue's default
  image kueue "$kueue"
  mkdir -p "$folder"
  cat >"$folder/controller_manager_config.yaml" <<YAML
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {healthProbeBindAddress: ":8081"}
metrics: {bindAddress: ":8443"}
webhook: {port: 9443}
leaderElection: {leaderElect: true, resourceName: c1f6bfd2.kueue.x-k8s.io}
clientConnection: {qps: 50, burst: 100}
manageJobsWithoutQueueName: false
integrations: {frameworks: [$(IFS=,; echo "${frameworks[*]}")]}
YAML
  overlay "$folder" <<YAML
resources: [../default]
configMapGenerator:
- {name: kueue-manager-config, namespace: kueue-system, behavior: replace, files: [controller_manager_config.yaml]}
generatorOptions: {disableNameSuffixHash: true}
patches:
$(kueue_webhooks MutatingWebhookConfiguration mutating "$hooks")
$(kueue_webhooks ValidatingWebhookConfiguration validating "$hooks")
$(manager kueue "$kueue" kueue-controller-manager)
    - {op: add, path: /spec/template/metadata/annotations/kubedet~1jobs, value: "${frameworks[*]}"}
YAML
  deploy "$folder" kueue-system kueue-controller-manager
}

queues() {
  "$kubectl" apply --server-side --force-conflicts -f "$here/queues.yaml"
}

[[ -n ${KUBECONFIG:-} ]] || die "KUBECONFIG names no cluster"
kubectl=$(tool KUBECTL kubectl)
python=$(tool PYTHON python3)
mkdir -p "$cache"
for phase in "${@:-all}"; do
  case $phase in
    all) build; jobset; trainer; kueue; queues ;;
    build | jobset | trainer | kueue | queues) "$phase" ;;
    *) die "no such phase: $phase" ;;
  esac
done
