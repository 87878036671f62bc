"""The services that ``benchmarks/served_peers.py`` compares, a file for each peer, and how services are asked."""
