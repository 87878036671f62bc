"""An image classifier in Ray Serve: a deployment with replicas and batches."""

import signal

import ray
from classifier import SETTINGS, Classifier
from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=SETTINGS["workers"], ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class ImageClassifier:
    def __init__(self) -> None:
        self.classifier = Classifier()

    @serve.batch(max_batch_size=SETTINGS["batch"], batch_wait_timeout_s=0.0)
    async def batched(self, bodies):
        return self.classifier.classify([self.classifier.decode(body) for body in bodies])

    async def __call__(self, request: Request):
        return await self.batched(await request.body())


if __name__ == "__main__":
    ray.init(address="local", num_cpus=SETTINGS["workers"] + 1, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": SETTINGS["port"]})
    serve.run(ImageClassifier.bind(), route_prefix="/classify")
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()
