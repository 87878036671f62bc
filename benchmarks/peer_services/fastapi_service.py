"""An image classifier in FastAPI: a route that takes the body, and uvicorn with workers."""

import uvicorn
from classifier import SETTINGS, Classifier
from fastapi import FastAPI, Request

app = FastAPI()
classifier = Classifier()


@app.post("/classify")
async def classify(request: Request):
    return classifier.classify_one(await request.body())


if __name__ == "__main__":
    workers, port = SETTINGS["workers"], SETTINGS["port"]
    uvicorn.run("fastapi_service:app", port=port, workers=workers, log_level="warning", access_log=False)
