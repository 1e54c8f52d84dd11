# Run:ai's command line has no option for: mounts' read_only and sub_path, shared_memory's size
runai training standard submit retinanet-dgx \
  --image registry.example.com/kubedet/trainer:0.1.0 \
  --gpu-devices-request 8 \
  --cpu-core-request 32 \
  --cpu-core-limit 32 \
  --cpu-memory-request 128Gi \
  --cpu-memory-limit 128Gi \
  --large-shm \
  --existing-pvc claimname=datasets,path=/datasets \
  --existing-pvc claimname=checkpoints,path=/checkpoints \
  --run-as-non-root \
  --environment-variable PET_NPROC_PER_NODE=8 \
  --environment-variable NCCL_DEBUG=WARN \
  --restart-policy OnFailure \
  --backoff-limit 10 \
  --termination-grace-period 60s \
  --auto-deletion-time-after-completion 86400s \
  --preemptibility preemptible \
  --command -- python -m trainer launch -- train --config /checkpoints/dgx/config.json --shards /datasets/shards/openimages --output /checkpoints/dgx
