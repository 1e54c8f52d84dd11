# The image of the pipeline's steps: the trainer image with kfp. Built from the repository's root.
ARG BASE=kubedet-trainer:0.1.0
FROM ${BASE}

USER root
WORKDIR /opt/kubedet
RUN pip install -c constraints.txt '.[pipeline,export]'
USER 1000:1000
WORKDIR /home/kubedet
