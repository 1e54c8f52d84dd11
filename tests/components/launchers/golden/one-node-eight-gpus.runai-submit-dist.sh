# Run:ai's command line has no option for: run_as_non_root, grace_seconds, shared_memory's size
runai submit-dist pytorch --name retinanet-dgx \
  --image registry.example.com/kubedet/trainer:0.2.0 \
  --workers 0 \
  --gpu 8 \
  --cpu 32 \
  --cpu-limit 32 \
  --memory 128Gi \
  --memory-limit 128Gi \
  --large-shm \
  --pvc datasets:/datasets:ro \
  --pvc checkpoints:/checkpoints \
  --environment PET_NPROC_PER_NODE=8 \
  --environment PYTORCH_ALLOC_CONF=expandable_segments:True \
  --environment NCCL_DEBUG=WARN \
  --backoff-limit 10 \
  --ttl-after-finish 86400s \
  --command -- python -m trainer launch -- train --config /checkpoints/dgx/config.json --shards /datasets/shards/openimages --output /checkpoints/dgx
