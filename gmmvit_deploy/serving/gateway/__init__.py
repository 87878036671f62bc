"""HAProxy before one or two Triton servers: keys, TLS, limits, a queue.

The face: `options` and `files` (what is configured and written), `gateway` (starts it), `upstreams` (which server gets
requests), `haproxy` (the process and its commands).
"""
