"""A tokenizer of single characters with a chat template, 64 tokens as the tiny targets have them."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<user>", "<assistant>", "<end>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?!\n"
TEMPLATE = (
    "{% for turn in messages %}"
    "{% if turn.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ turn.role }}>{{ turn.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAD, BEGIN, USER, ASSISTANT, END = range(5)


def make_chat_tokenizer(template: str | None = TEMPLATE, characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Characters are tokens, in the order of `characters` after `SPECIAL`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=template,
    )
