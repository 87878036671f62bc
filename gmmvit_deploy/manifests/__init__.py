"""Manifests for Kubernetes, the model as an OCI image, Dockerfiles, and the number of machines for a load."""
