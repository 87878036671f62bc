"""Manifests for Kubernetes, and build contexts for images of the server and of the model."""
