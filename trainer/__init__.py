"""Everything that runs in a training pod: data, model, training, evaluation, export.

Needs torch, torchvision, pycocotools and minio; never kfp or kubeflow-training.
"""
