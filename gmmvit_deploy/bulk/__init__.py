"""Classify millions of images: a job of fixed shards that can be interrupted and continued at any time.

    source ──list──> listing ──cut──> manifest: fixed shards of fixed batches ──classify──> a shard-*.parquet a shard

The content of a shard depends on the bundle, the source and the plan alone. Any process may therefore compute any
missing shard, at any time, and two processes that compute the same shard write the same bytes.

    source.py    the files of a source, and the images in them       storage.py   the job's folder, and its locks
    plan.py      the plan and the manifest of a job                  pipeline.py  read and decode ahead of the network
    shard.py     classify a shard and write its rows                 run.py       start or continue a job
    local.py, worker.py, ray_tasks.py   launchers                    report.py, page.py   the report on a whole job
"""
