"""Asks a model with tritonclient, blocking and with asyncio. The model adds two numbers: x FP32[1,2] to y FP32[1,1].

pip install 'tritonclient[http]'
python ask.py 127.0.0.1:8080 m
"""

import asyncio
import sys

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio


def once(address: str, model: str) -> None:
    """One request; tensors are binary by default."""
    x = triton.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(np.array([[1, -2]], np.float32))
    with triton.InferenceServerClient(address, connection_timeout=2, network_timeout=2) as client:
        answer = client.infer(model, [x], timeout=1_000_000)  # microseconds
        print("one", answer.as_numpy("y")[0, 0])


async def several(address: str, model: str) -> None:
    """Several at once, each on a connection of its own."""
    async with triton_aio.InferenceServerClient(address) as client:

        async def ask(value: float) -> float:
            x = triton_aio.InferInput("x", [1, 2], "FP32")
            x.set_data_from_numpy(np.array([[value, 1]], np.float32))
            return float((await client.infer(model, [x])).as_numpy("y")[0, 0])

        print("several", *await asyncio.gather(*(ask(value) for value in range(5))))


if __name__ == "__main__":
    once(*sys.argv[1:])
    asyncio.run(several(*sys.argv[1:]))
