"""An image classifier in LitServe: decode_request, predict and encode_response, with batches."""

from typing import Annotated

import litserve
from classifier import SETTINGS, Classifier
from fastapi import Body


class ClassifierAPI(litserve.LitAPI):
    def setup(self, device):
        self.classifier = Classifier()

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]):
        return self.classifier.decode(request)

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return self.classifier.classify(inputs)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output


if __name__ == "__main__":
    api = ClassifierAPI(max_batch_size=SETTINGS["batch"], batch_timeout=0.001, api_path="/classify")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=SETTINGS["workers"])
    server.run(host="127.0.0.1", port=SETTINGS["port"], generate_client_file=False, log_level="warning")
