"""Everything that runs in a training pod: data, model, training, evaluation, export.

Requires torch, torchvision, pycocotools and minio; never imports kfp or kubeflow-training.
"""
