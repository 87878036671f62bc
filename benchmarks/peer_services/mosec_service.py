"""An image classifier in mosec: a stage that decodes, and a stage that computes batches."""

import json

from classifier import SETTINGS, Classifier
from mosec import Server, Worker


class Inference(Worker):
    def __init__(self) -> None:
        self.classifier = Classifier()

    def deserialize(self, data):
        return self.classifier.decode(data)

    def forward(self, data):
        return self.classifier.classify(data)

    def serialize(self, data):
        return json.dumps(data).encode()


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Inference,
        num=SETTINGS["workers"],
        max_batch_size=SETTINGS["batch"],
        max_wait_time=1,
        timeout=30,  # the default of 3 s is too short for a batch of a large network
        route="/classify",
    )
    server.run()
