"""Measure the latency and throughput of several runners in the same run, by the rules of MLPerf LoadGen.

A runner is a runtime, engine or server that computes the logits. The face: `run` (the command), `cells` (the
rounds), `tune`, `roofline` and `waterfall` (where time goes), `compare`, `report` and `page`.
"""
