"""Measure the latency and throughput of several runners in the same run, by the rules of MLPerf LoadGen."""
