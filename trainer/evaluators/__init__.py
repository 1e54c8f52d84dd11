"""Complete evaluations, of a model on shards and of files of detections: scores, gate and report."""
