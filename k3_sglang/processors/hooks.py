"""Where images meet SGLang: whether a checkpoint is served with them, what prepares them, the first request."""

from __future__ import annotations

import base64
import io
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from k3_sglang import compat
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.engine_tokenizer import EngineTokenizer, is_k3_directory
from k3_sglang.vision.support import image_support, why_text_only

logger = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 600.0
UPSTREAM_PROCESSORS = "sglang.srt.multimodal.processors"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ImageHooks:
    """The hooks of one process.

    Args:
        own_model: whether our model class is served; upstream's would need the checkpoint's own code to prepare a
            picture, which is never run, so with it K3 takes text only.
    """

    def __init__(self, own_model: bool) -> None:
        self.own_model = own_model

    def serves(self, directory: object) -> bool:
        """Whether a model path is served with images here."""
        if not (self.own_model and isinstance(directory, str) and is_k3_directory(directory)):
            return False
        return why_text_only(directory) is None

    def model_config(self, *args: Any, **kwargs: Any) -> Arguments:
        """Before SGLang's ``ModelConfig``: decides ``enable_multimodal`` for K3, unless the user has."""
        path = kwargs.get("model_path", args[1] if len(args) > 1 else None)
        if kwargs.get("enable_multimodal") is None and isinstance(path, str) and is_k3_directory(path):
            kwargs["enable_multimodal"] = self.serves(path)
        return args, kwargs

    def get_processor(self, original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """Around SGLang's ``get_processor``: tokenizer and image rules of a K3 directory, read as data."""
        if not self.serves(name):
            return original(name, *args, **kwargs)
        from k3_sglang.processors.kimi_k3 import TokenizerAndImages

        return TokenizerAndImages(EngineTokenizer(K3Tokenizer.from_dir(name), name), image_support(name))

    def import_processors(self, original: Callable[..., Any], package: str, *args: Any, **kwargs: Any) -> None:
        """Around SGLang's ``import_processors``: ours instead of the eighty upstream ones, and a failure is an error.

        Upstream logs and skips a processor that cannot be imported.
        """
        if package != UPSTREAM_PROCESSORS or not self.serves(compat.get_model().model_path):
            original(package, *args, **kwargs)
            return
        from k3_sglang.processors.kimi_k3 import K3ImageProcessor

        for architecture in K3ImageProcessor.models:
            compat.PROCESSOR_MAPPING[architecture] = K3ImageProcessor

    def tokenize_one_request(self, manager: Any, request: Any) -> None:
        """Before a request is tokenized: refuse what SGLang would let pass in silence.

        Raises:
            ValueError: pictures for an engine without a processor, or a placeholder without a picture. Status 400.
        """
        if request.contains_mm_input():
            if manager.mm_processor is None:
                raise ValueError(f"image_data is given, but this engine serves {manager.model_path} as text only")
            return
        placeholder_id = getattr(getattr(manager.mm_processor, "images", None), "placeholder_id", None)
        if placeholder_id is not None and placeholder_id in (request.input_ids or ()):
            raise ValueError(f"the prompt has an image placeholder (token {placeholder_id}) but no image_data")

    def wait_and_warmup(self, *args: Any, **kwargs: Any) -> Arguments:
        """Before SGLang's own first request: ours.

        Upstream's sends a picture to its chat endpoint, which knows nothing of K3's prompts, and stops the server when
        that fails.
        """
        if self.serves(compat.get_model().model_path):
            kwargs["execute_warmup_func"] = warm_up
        return args, kwargs


def warm_up(server_args: Any) -> bool:
    """Ask about a picture of one pixel as soon as the server listens; a server that cannot answer is stopped."""
    images = image_support(compat.get_model().model_path)
    body = {
        "input_ids": [0, images.placeholder_id, 0],
        "image_data": [one_pixel()],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }
    api_key = compat.get_serving().api_key
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The server asks itself: whatever its certificate says, it is the right one.
    with httpx.Client(headers=headers, timeout=WARM_UP_TIMEOUT_S, trust_env=False, verify=False) as client:
        try:
            _wait_until_listening(client, f"{server_args.url()}/model_info")
            response = client.post(f"{server_args.url()}/generate", json=body)
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"status {response.status_code}: {response.text}")
        except (httpx.HTTPError, RuntimeError) as error:
            logger.error("the first request, a picture of one pixel, failed; stopping: %s", error)
            compat.kill_process_tree(os.getpid())
            return False
    compat.http_server_state.tokenizer_manager.server_status = compat.ServerStatus.Up
    return True


def one_pixel() -> str:
    """A data URL of the smallest picture; it becomes one token."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _wait_until_listening(client: httpx.Client, url: str) -> None:
    deadline = time.monotonic() + WARM_UP_TIMEOUT_S
    while True:
        try:
            client.get(url)
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
