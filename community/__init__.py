"""The pipeline's steps as Kubeflow's community keeps components: github.com/kubeflow/pipelines-components.

That repository prescribes folders, files and their form, and checks them. All of it is made here from the
components as they are; nothing of it is kept, so nothing grows old.
"""
