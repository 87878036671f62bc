"""A real Triton server and what stands before it.

The face: `repository` (of Triton models), `server` (a Triton server), `service` (all that runs around it), `run`
(what the command ``gmmvit serve`` does), `served_models` (the one reader of ``config.pbtxt``), and the packages
`gateway` (HAProxy), `front` (``/classify``) and `rollout`.
"""
