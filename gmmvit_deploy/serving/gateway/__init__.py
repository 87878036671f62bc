"""HAProxy before one or two Triton servers: keys, TLS, limits, a queue.

The face: `options` and `files` (what is configured and written), `service` (starts it), `places` (which server gets
requests), `own` (files for a gateway of one's own), `haproxy` (the process and its commands).
"""
