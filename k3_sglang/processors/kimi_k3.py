"""SGLang's image processor for K3: a request's pictures to patches, its prompt to the expanded prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3_sglang.announce import announce
from k3_sglang.compat import BaseMultimodalProcessor, Modality, MultimodalDataItem, MultimodalProcessorOutput
from k3_sglang.engine_tokenizer import EngineTokenizer
from k3_sglang.models.kimi_k3 import KimiK3ForConditionalGeneration
from k3_sglang.processors.embedding import GRID
from k3_sglang.vision.prompt import ExpandedPrompt, PlacedImage, expand
from k3_sglang.vision.support import ImageSupport


@dataclass(frozen=True)
class TokenizerAndImages:
    """What SGLang passes around as a model's processor; it takes the tokenizer from here."""

    tokenizer: EngineTokenizer
    images: ImageSupport


class K3ImageProcessor(BaseMultimodalProcessor):
    """Prepares requests with ``image_data`` in the tokenizer process.

    The prompt comes as token ids with one placeholder per picture. A picture is a data URL or base64: the engine opens
    no file and fetches no URL. Every refusal is a ValueError, which SGLang answers with status 400.
    """

    models = [KimiK3ForConditionalGeneration]
    prefer_tokenized_input = True
    auto_mm_processor_worker_num = 1
    auto_mm_io_worker_num = 2
    """Requests whose pictures are decoded at the same time; one decodes its pictures one by one."""

    def __init__(
        self,
        hf_config: Any,
        server_args: Any,
        _processor: TokenizerAndImages,
        transport_mode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(hf_config, server_args, _processor, transport_mode, *args, **kwargs)
        self.images = _processor.images
        announce("images", placeholder_id=self.images.placeholder_id)

    async def process_mm_data_async(
        self,
        image_data: Sequence[Any] | None,
        audio_data: Any,
        input_text: str | Sequence[int],
        request_obj: Any,
        max_req_input_len: int | None = None,
        **_: Any,
    ) -> Any:
        """Decode and cut the pictures off the event loop.

        Raises:
            ValueError: sound or video, or what :func:`k3_sglang.vision.prompt.expand` refuses.
        """
        if audio_data or request_obj.video_data:
            raise ValueError("audio_data or video_data is given; allowed: image_data, K3 takes pictures only")
        if isinstance(input_text, str):
            raise ValueError("image_data needs the prompt as input_ids: text cannot hold an image placeholder")
        sources = list(image_data or [])
        if len(sources) == 1 and isinstance(sources[0], list):
            sources = sources[0]  # several pictures with `n` above 1 can only be given as a list of lists
        # SGLang's own chat endpoint wraps a source in an object.
        sources = [getattr(source, "url", source) for source in sources]
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(
            self.io_executor, expand, input_text, sources, self.images, max_req_input_len
        )
        return processor_output(prompt, self.images.placeholder_id)


def processor_output(prompt: ExpandedPrompt, placeholder_id: int) -> Any:
    """An expanded prompt as SGLang sends it to its scheduler."""
    items = [_item(image) for image in prompt.images]
    return MultimodalProcessorOutput(input_ids=prompt.ids, mm_items=items, im_token_id=placeholder_id)


def _item(image: PlacedImage) -> Any:
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=torch.from_numpy(image.patches.pixels),
        offsets=[(image.first, image.first + image.rows - 1)],  # the end is inclusive
        model_specific_data={GRID: torch.tensor([image.patches.grid])},
    )
    item.set_identity(image.identity)
    return item
