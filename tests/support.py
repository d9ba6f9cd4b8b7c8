"""What works with which family of targets: the checks behind docs/support.md, which `python tests/support.py` writes.

Every check compares tokens with plain `generate`, in float32.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from families import FAMILIES, IMAGE_FAMILIES, media_prompt
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_stub, make_target, make_tokenizer
from test_refused_targets import REASONS
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_ddtree import DDTreeConfig
from hf_ddtree.cache import cache_name, output_cache

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
NEW = 16
PAGE = Path(__file__).parent.parent / "docs" / "support.md"


def same(target: PreTrainedModel, **options: object) -> None:
    """The same call, by plain decoding and with three drafters: right off the spine, a real one, another model."""
    expected = greedy(target, PROMPT, NEW, **options)
    for drafter in (make_stub(target, "oracle-2", expected[0]), make_drafter(target), target):
        assert decode(target, drafter, PROMPT, max_new_tokens=NEW, **options).tolist() == expected.tolist()


def with_attention(implementation: str) -> Callable[[PreTrainedModel], None]:
    """Greedy decoding with an attention implementation."""

    def check(target: PreTrainedModel) -> None:
        before = target.config.get_text_config()._attn_implementation
        try:
            target.set_attn_implementation(implementation)
            same(target)
        finally:
            target.set_attn_implementation(before)

    return check


def sampling(target: PreTrainedModel) -> None:
    """Plain decoding with the same keyed noise samples the same text."""
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 0}
    expected = sampled(target, PROMPT, NEW, seed=3, **settings)
    for drafter in (make_stub(target, "oracle-2", expected[0]), target):
        tokens = decode(target, drafter, PROMPT, max_new_tokens=NEW, do_sample=True, seed=3, **settings)
        assert tokens.tolist() == expected.tolist()


def batch(target: PreTrainedModel) -> None:
    """Rows of three lengths, padded on the left, that end at different rounds, are what they are alone."""
    ids, mask = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(3, 1)]), torch.ones(3, 10, dtype=torch.int64)
    mask[1, :4], mask[2, :7] = 0, 0
    prompts = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    end = int(greedy(target, prompts[0], NEW)[0, 15])
    stop = {"eos_token_id": end, "pad_token_id": 0, "max_new_tokens": NEW}
    for drafter in (make_drafter(target), target):
        tokens = decode(target, drafter, ids, attention_mask=mask, **stop)
        for row, prompt in zip(tokens, prompts, strict=True):
            alone = target.generate(prompt, do_sample=False, **stop)[0, prompt.shape[1] :].tolist()
            assert row[10:].tolist() == alone + [0] * (len(row) - 10 - len(alone))


def sequences(target: PreTrainedModel) -> None:
    """`num_return_sequences`."""
    expected = sampled(target, PROMPT.expand(3, -1), NEW, seed=3, top_k=0)
    options = {"do_sample": True, "seed": 3, "top_k": 0, "num_return_sequences": 3}
    assert decode(target, target, PROMPT, max_new_tokens=NEW, **options).tolist() == expected.tolist()


def processors(target: PreTrainedModel) -> None:
    """A penalty, forbidden repetitions, and a function of the text so far."""
    same(target, repetition_penalty=1.3, no_repeat_ngram_size=3)
    same(target, prefix_allowed_tokens_fn=lambda row, ids: range(int(ids[-1]) % 2, 64, 2))


def stops(target: PreTrainedModel) -> None:
    """An end token inside a block, and a stop string of several tokens."""
    text, tokenizer = greedy(target, PROMPT, NEW)[0, 10:], make_tokenizer()
    same(target, eos_token_id=int(text[5]), pad_token_id=0)
    same(target, stop_strings=tokenizer.decode(text[6:9]), tokenizer=tokenizer)


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.steps.append(value.tolist())

    def end(self) -> None:
        self.steps.append([])


def streaming(target: PreTrainedModel) -> None:
    """A streamer is given what plain decoding gives it."""
    plain, ours = Recorder(), Recorder()
    greedy(target, PROMPT, NEW, streamer=plain)
    decode(target, target, PROMPT, max_new_tokens=NEW, streamer=ours)
    assert ours.steps == plain.steps


def continuing(target: PreTrainedModel) -> None:
    """A second turn on the cache of the first."""
    drafter = make_drafter(target)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    first = decode(target, drafter, PROMPT, **options)
    ids = torch.cat([first.sequences, PROMPT[:, 2:6]], dim=1)
    mask = {"attention_mask": torch.ones_like(ids)}  # else `generate` takes pad tokens in the answer for padding
    second = decode(target, drafter, ids, **mask, **options, **{cache_name(target): output_cache(first)})
    assert second.sequences.tolist() == greedy(target, ids, NEW, **mask).tolist()


def chunks(target: PreTrainedModel) -> None:
    """`prefill_chunk_size`."""
    expected = greedy(target, PROMPT, NEW)
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, prefill_chunk_size=4)
    assert tokens.tolist() == expected.tolist()


def embeddings(target: PreTrainedModel) -> None:
    """A prompt of embeddings."""
    embeds = {"inputs_embeds": target.get_input_embeddings()(PROMPT)}
    expected = target.generate(**embeds, do_sample=False, max_new_tokens=NEW)
    tokens = decode(target, make_drafter(target), None, max_new_tokens=NEW, **embeds)
    assert tokens.tolist() == expected.tolist()


def lookup(target: PreTrainedModel) -> None:
    """`DDTreeConfig(drafter="lookup")`, after a prompt that repeats itself."""
    prompt = torch.cat([PROMPT, PROMPT, PROMPT[:, :4]], dim=1)
    tokens = decode(target, None, prompt, max_new_tokens=NEW, drafter="lookup")
    assert tokens.tolist() == greedy(target, prompt, NEW).tolist()


def assistant(target: PreTrainedModel) -> None:
    """Another model's trees, and the target's own."""
    expected = greedy(target, PROMPT, NEW)
    for model in (make_target("llama", seed=4), target):
        assert decode(target, model, PROMPT, max_new_tokens=NEW).tolist() == expected.tolist()


def with_media(kind: str) -> Callable[[PreTrainedModel], None]:
    """A prompt with an image or a video, and two of them in a batch."""

    def check(target: PreTrainedModel) -> None:
        family = next(name for name in IMAGE_FAMILIES if FAMILIES[name]["model_type"] == target.config.model_type)
        config = DDTreeConfig(tree_budget=16, max_new_tokens=NEW, do_sample=False)
        prompts = [media_prompt(family, kind, seed) for seed in (0, 1)]
        alone = [target.generate(**prompt, do_sample=False, max_new_tokens=NEW) for prompt in prompts]
        both = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
        for drafter in (make_stub(target, "oracle-2", alone[0][0]), target):
            tokens = target.generate(**prompts[0], assistant_model=drafter, generation_config=config)
            assert tokens.tolist() == alone[0].tolist()
        tokens = target.generate(**both, assistant_model=make_drafter(target), generation_config=config)
        assert tokens.tolist() == torch.cat(alone).tolist()

    return check


FEATURES: dict[str, Callable[[PreTrainedModel], None]] = {
    "sdpa": with_attention("sdpa"),
    "eager": with_attention("eager"),
    "sampling": sampling,
    "batch": batch,
    "num_return_sequences": sequences,
    "processors": processors,
    "stops": stops,
    "streaming": streaming,
    "continuing": continuing,
    "chunked prefill": chunks,
    "inputs_embeds": embeddings,
    "static cache": lambda target: same(target, cache_implementation="static"),
    "assistant model": assistant,
    "lookup": lookup,
    "image": with_media("image"),
    "video": with_media("video"),
}
# What a family itself lacks: no cell to fill.
MISSING = {("gpt_oss", "sdpa"), ("gemma2", "sdpa"), ("gemma3-images", "inputs_embeds")} | {
    (family, kind)
    for family in FAMILIES
    for kind in ("image", "video")
    if family not in IMAGE_FAMILIES or (family, kind) == ("gemma3-images", "video")
}
# What plain `generate` of transformers before 5.24 fails at.
OLD_FAULTS = {("kimi_k25", "video"), ("qwen3_vl", "chunked prefill")}


def page() -> str:
    """docs/support.md."""
    lines = ["| | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for family in FAMILIES:
        cells = ["-" if (family, feature) in MISSING else _yes(family, feature) for feature in FEATURES]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    refused = "\n".join(
        f'- {", ".join(f"`{name}`" for name in sorted(kinds))}: "{reason}"' for reason, kinds in REASONS.items()
    )
    return INTRODUCTION + "\n".join(lines) + NOTES + refused + "\n"


def _yes(family: str, feature: str) -> str:
    return "yes*" if (family, feature) in OLD_FAULTS else "yes"


INTRODUCTION = """# What works with which target

Written by `python tests/support.py` from the matrix that `tests/test_support.py` runs: each "yes" is a test,
`test_cell[family-feature]`, which compares tokens in float32 with plain `generate` (with the same keyed noise when
sampling). "-": the model, or plain `generate` of it, has no such thing. "*": plain `generate` fails at it before
transformers 5.24.

"""
NOTES = """

Sliding-window layers: qwen3-sliding, mistral, gpt_oss, gemma2, gemma3. Latent (MLA) layers: deepseek_v2, deepseek_v3,
kimi_k25. Experts: qwen3_moe, gpt_oss, deepseek_v2, deepseek_v3, kimi_k25. Images and videos are read in the prefill
only; positions of several numbers (mRoPE: qwen3_vl) are counted on all. Other decoder-only families with full or
sliding attention and positions go through the same code and are not listed because nothing tests them here.

## Refused before the first forward

With the reason in the error; `tests/test_refused_targets.py` has a test for each. Model types as transformers has them:

"""

if __name__ == "__main__":
    PAGE.write_text(page())
