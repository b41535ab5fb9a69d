"""An untrained tokenizer: one token per byte, whose id is the byte."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Special tokens, with ids 256 to 259."""
VOCAB_SIZE: Final = 256 + len(SPECIAL_TOKENS)
VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Additional special tokens of vision models, with ids 260 to 263."""
AUDIO_TOKENS: Final = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
"""Additional special tokens of audio models, with ids 260 to 262."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""


def _with_parts(placeholder: str) -> str:
    """Return ChatML with content parts, and this expression of a template for each medium ``part``."""
    return (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% else %}{{ " + placeholder + " }}{% endif %}"
        "{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


VISION_CHAT_TEMPLATE: Final = _with_parts("'<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>'")
"""ChatML with content parts, and a placeholder for each image or video, in Qwen-VL's form."""

AUDIO_CHAT_TEMPLATE: Final = _with_parts("'<|audio_bos|><|AUDIO|><|audio_eos|>'")
"""The same with a placeholder for each sound, in Qwen2-Audio's form."""


def byte_tokenizer(
    *, model_max_length: int = 1024, vision: bool = False, audio: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0 to 255 are the bytes of UTF-8 text, followed by four special tokens.

    ``<|im_end|>`` is EOS, ``<|pad|>`` is padding, the chat template is ChatML, and no token is added to plain text. A
    character beyond ASCII takes two to four tokens, so a decoded prefix may end inside one. When transformers loads it
    from a folder of architecture ``qwen2``, it uses that family's tokenizer class, which normalises text to NFC first.

    Args:
        model_max_length: Context length in tokens, written to the tokenizer's configuration.
        vision: Add :data:`VISION_TOKENS` and a chat template that places images.
        audio: Add :data:`AUDIO_TOKENS` and a chat template that places sounds; not together with ``vision``.
    """
    assert not (vision and audio)
    further = VISION_TOKENS if vision else AUDIO_TOKENS if audio else ()
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = SPECIAL_TOKENS + further
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>", *further],
        chat_template=VISION_CHAT_TEMPLATE if vision else AUDIO_CHAT_TEMPLATE if audio else CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _characters() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary: itself if printable, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
