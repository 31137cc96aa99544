"""Messages of one stream as checked requests."""

from __future__ import annotations

from msgspec import structs

from agent.http.codecs import Head, InferRequest, Wish, read_head, split_body
from agent.http.framing.decoder import Message
from agent.http.framing.encoder import Encoder
from agent.strings import pack_strings
from targets.errors import ContractError
from targets.tensor import Contract

_TENSORS = ("application/json", "application/octet-stream")


class RequestReader:
    """Checks messages against the contract, or against that for images, where the model has a recipe.

    A sensor sends the same JSON with every frame, so the last is remembered: what it says is checked once, and a frame
    costs no more than its tensors. Where the encoder of the answers has a place for raw tensors, who sends raw tensors
    gets them, unless it asks for JSON.
    """

    def __init__(self, contract: Contract, images: Contract | None, encoder: Encoder) -> None:
        self._contract = contract
        self._images = images
        self._encoder = encoder
        self._json = b""
        self._head: Head | None = None

    def read(self, message: Message) -> InferRequest:
        """The request that a message is. Raises ContractError or RefusedError, as `decode_infer` does."""
        if message.header_length is None and message.media_type not in _TENSORS:
            return self._image(message)
        request = self._tensors(message)
        self._encoder.check(binary=any(wish.binary for wish in request.wishes))
        return request if message.id is None or request.id is not None else structs.replace(request, id=message.id)

    def _tensors(self, message: Message) -> InferRequest:
        json, tensors = split_body(message.body, message.header_length)
        if self._head is not None and json == self._json:
            return self._head.request(tensors)
        binary = self._encoder.binary and message.header_length is not None
        head = read_head(json, self._contract, self._images, binary, len(tensors))
        request = head.request(tensors)
        if json and tensors:
            self._json, self._head = json, head
        return request

    def _image(self, message: Message) -> InferRequest:
        kind = message.media_type or "no Content-Type"
        if self._images is None:
            raise ContractError(
                f"a part of {kind}, and the model takes tensors, no images", f"send {' or '.join(_TENSORS)}"
            )
        if message.media_type and not message.media_type.startswith("image/"):
            raise ContractError(f"a part of {kind}", f"send image/jpeg, image/png, {' or '.join(_TENSORS)}")
        wishes = tuple(Wish(index, False) for index in range(len(self._images.outputs)))
        return InferRequest(message.id, ((1,),), (pack_strings([message.body]),), wishes, None, is_image=True)
