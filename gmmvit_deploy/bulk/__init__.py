"""Classify millions of images: a job of fixed shards that can be interrupted and continued at any time.

    source ──list──> listing ──cut──> manifest: fixed shards of fixed batches ──classify──> a shard-*.parquet a shard

The content of a shard depends on the bundle, the source and the plan alone. Any process may therefore compute any
missing shard, at any time, and two processes that compute the same shard write the same bytes.

The face: `job` (options), `source` (the files, and the images in them), `run` (start or continue a job).
"""
