"""The steps as github.com/kubeflow/pipelines-components keeps components, generated from ours."""
