"""Infer with the clients of the package kserve, and print the logits as JSON; tests/serving/test_kserve.py runs this.

Arguments: the HTTPS address, host and port of gRPC, a key file, a file of certificates, an .npy file of pixels.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

MODEL = "gmmvit_network"


def request(pixels: np.ndarray, *, binary: bool) -> InferRequest:
    tensor = InferInput(name="pixels", shape=list(pixels.shape), datatype="UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    return InferRequest(model_name=MODEL, infer_inputs=[tensor])


async def main(http_url: str, grpc_address: str, key_file: str, ca: str, pixels_file: str) -> None:
    authorization = f"Bearer {Path(key_file).read_text().strip()}"
    pixels = np.load(pixels_file)
    rest = InferenceRESTClient(RESTConfig(protocol="v2", verify=ca))
    over_http = await rest.infer(
        http_url, request(pixels, binary=True), model_name=MODEL, headers={"authorization": authorization}
    )
    grpc = InferenceGRPCClient(grpc_address, use_ssl=True, root_certificates=ca)
    over_grpc = await grpc.infer(request(pixels, binary=True), headers=(("authorization", authorization),))
    await rest.close()
    await grpc.close()
    answers = {"http": over_http, "grpc": over_grpc}
    print(json.dumps({name: answer.outputs[0].as_numpy().tolist() for name, answer in answers.items()}))


asyncio.run(main(*sys.argv[1:]))
