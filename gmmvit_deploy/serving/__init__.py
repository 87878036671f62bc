"""A real Triton server and what stands before it.

The face: `repository` (of Triton models), `server` and `service` (start and supervise), `serving` (what the command
``gmmvit serve`` does), `served_models` (the one reader of ``config.pbtxt``), and the packages `gateway` (HAProxy),
`front` (``/classify``) and `rollout`.
"""
