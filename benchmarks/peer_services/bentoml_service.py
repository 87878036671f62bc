"""An image classifier in BentoML: a service with an API that takes the image file as its root input."""

from pathlib import Path
from typing import Annotated, Any

import bentoml
from bentoml.validators import ContentType
from classifier import SETTINGS, Classifier


@bentoml.service(workers=SETTINGS["workers"])
class ImageClassifier:
    def __init__(self) -> None:
        self.classifier = Classifier()

    @bentoml.api(route="/classify")
    def classify(self, image: Annotated[Path, ContentType("image/*")], /) -> dict[str, Any]:
        return self.classifier.classify_one(image.read_bytes())
