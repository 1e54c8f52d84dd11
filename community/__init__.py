"""The pipeline's steps as Kubeflow's community keeps components: github.com/kubeflow/pipelines-components.

That repository prescribes and checks folders and files, which are generated here from the components.
"""
