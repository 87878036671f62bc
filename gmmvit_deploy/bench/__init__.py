"""Measure latency and throughput of every runner side by side, by the rules of MLPerf LoadGen."""
