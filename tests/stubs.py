"""Tiny random targets of every family, and stub drafters whose behaviour is known (known faults, fixtures)."""

from collections.abc import Callable, Sequence

import torch
from families import (  # noqa: F401 - tests take them from here
    CORE_FAMILIES,
    FAMILIES,
    HIDDEN,
    IMAGE_FAMILIES,
    LAYERS,
    VOCAB,
)
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashConfig, DFlashDraftModel
from hf_ddtree.context import Context
from hf_ddtree.drafting import Request
from hf_ddtree.emission import Emissions
from hf_ddtree.masks import Cached, slot_mask
from hf_ddtree.tree import Tree

BLOCK = 8
# A drafter's layers, two of them, and the window of its sliding ones.
WINDOW = 8
LAYER_TYPES = {
    "full": ["full_attention"] * 2,
    "sliding": ["sliding_attention"] * 2,
    "mixed": ["sliding_attention", "full_attention"],
}


def make_target(family: str, seed: int = 0, attention: str | None = None, **overrides: object) -> PreTrainedModel:
    """A tiny random float32 target of `family`, in eval mode."""
    config = AutoConfig.for_model(**{**FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM
    options = {"attn_implementation": attention} if attention else {}
    target = auto.from_config(config, **options).float().eval()
    for name, weight in target.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # Gemma's are zero at first, so images would say nothing
            torch.nn.init.normal_(weight)
    return target


def make_drafter(target: PreTrainedModel, seed: int = 1, **overrides: object) -> DFlashDraftModel:
    """A tiny random drafter that fits `target`."""
    source = target.config.get_text_config()
    torch.manual_seed(seed)
    fields = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": BLOCK,
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
        "initializer_range": 0.3,
    }
    return DFlashDraftModel(DFlashConfig(**{**fields, **overrides})).eval()


# Given the committed length and the depths wanted, the draft logits [1, depth, vocab].
DraftLogits = Callable[[int, int], torch.Tensor]


class StubGenerator(DDTreeCandidateGenerator):
    """Runs the real drafter, so that its cache is exercised, and then says something else."""

    def __init__(self, drafter: DFlashDraftModel, *args: object):
        super().__init__(drafter, *args)
        self.committed = 0
        self.contexts: list[Context] = []

    def draft_block(self, root_tokens: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        real, states = super().draft_block(root_tokens, context)
        self.contexts.append(context)
        logits = []
        for row, length in enumerate(context.lengths):
            self.committed = int(context.positions[row, length - 1]) + 2  # the root included
            logits.append(self.drafter.logits_for(self.committed, real[row : row + 1]))
        return torch.cat(logits), states


class StubDrafter(DFlashDraftModel):
    """A drafter whose drafts come from `logits_for(committed length, the real draft logits)`."""

    logits_for: Callable[[int, torch.Tensor], torch.Tensor]


def oracle(reference: torch.Tensor, rank: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Puts the true next token of `reference` [length] at `rank` (1 = the spine) of every depth."""

    def logits_for(committed: int, real: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(committed)
        logits = torch.rand(real.shape, generator=generator)
        for depth in range(real.shape[1]):
            if committed + depth < len(reference):
                true = int(reference[committed + depth])
                logits[0, depth, true] = 0.0
                others = logits[0, depth].topk(rank - 1).indices
                logits[0, depth, others] += 4.0
                logits[0, depth, true] = 3.0
        return logits

    return logits_for


def anti(reference: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Never proposes the true next token while there is another."""

    def logits_for(committed: int, real: torch.Tensor) -> torch.Tensor:
        logits = oracle(reference, 1)(committed, real)
        for depth in range(real.shape[1]):
            if committed + depth < len(reference):
                logits[0, depth, int(reference[committed + depth])] = -torch.inf
        return logits

    return logits_for


def random_drafts(reference: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Random logits, new in every round."""

    def logits_for(committed: int, real: torch.Tensor) -> torch.Tensor:
        return 3 * torch.randn(real.shape, generator=torch.Generator().manual_seed(1000 + committed))

    return logits_for


STUBS: dict[str, Callable[[torch.Tensor], Callable[[int, torch.Tensor], torch.Tensor]]] = {
    "oracle-1": lambda reference: oracle(reference, 1),
    "oracle-2": lambda reference: oracle(reference, 2),
    "oracle-3": lambda reference: oracle(reference, 3),
    "anti": anti,
    "rand": random_drafts,
}


def make_stub(target: PreTrainedModel, kind: str, reference: torch.Tensor, **overrides: object) -> StubDrafter:
    """A stub drafter for `target` that knows `reference` [length], prompt included."""
    real = make_drafter(target, **overrides)
    stub = StubDrafter(real.config).eval()
    stub.load_state_dict(real.state_dict())
    stub.logits_for = STUBS[kind](reference)
    return stub


def make_context(hidden_states: torch.Tensor, start: int = 0) -> Context:
    """Rows' states [rows, tokens, taps * hidden], all of them their own, from position `start` on."""
    rows, tokens = hidden_states.shape[:2]
    return Context(hidden_states, torch.arange(start, start + tokens).expand(rows, -1), [tokens] * rows)


def make_request(ids: torch.Tensor, context: Context, max_depth: int) -> Request:
    """What comes after `ids` [rows, length], without noise."""
    return Request(list(ids), context, max_depth, lambda depth, like: None)


def make_emissions(
    ids: torch.Tensor,
    config: DDTreeConfig,
    processors: Sequence[LogitsProcessor] = (),
    criteria: Sequence[StoppingCriteria] = (),
    padding: int = 0,
) -> Emissions:
    """The texts of a call on `ids` [rows, length], of which each row's first `padding` tokens are padding."""
    config._pad_token_tensor = None  # `generate` sets it
    lists = LogitsProcessorList(processors), StoppingCriteriaList(criteria)
    return Emissions(ids, *lists, config, [padding] * len(ids))


def tree_mask(tree: Tree, visible: torch.Tensor, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """The mask of a tree right after the cached keys, of which `visible` [rows, slots] may be seen."""
    return slot_mask(Cached(visible), tree.ancestors(), visible.shape[1] + tree.depths, dtype, window)


def greedy(target: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **kwargs: object) -> torch.Tensor:
    """[1, length] plain greedy decoding, the reference."""
    return target.generate(ids, do_sample=False, max_new_tokens=new_tokens, **kwargs)


CALL_ARGUMENTS = (
    *("streamer", "logits_processor", "stopping_criteria", "tokenizer", "attention_mask", "prefix_allowed_tokens_fn"),
    *("cache", "past_key_values", "position_ids", "token_type_ids", "logits_to_keep", "inputs_embeds"),
    "assistant_tokenizer",
)


def decode(target: PreTrainedModel, drafter: object, ids: torch.Tensor, /, **fields: object):
    """Tree decoding; the settings that only `generate` takes go to it, all others into a `DDTreeConfig`."""
    call = {name: fields.pop(name) for name in CALL_ARGUMENTS if name in fields}
    config = DDTreeConfig(**{"do_sample": False, "tree_budget": 16, **fields})
    return target.generate(ids, assistant_model=drafter, generation_config=config, **call)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: padding, begin, 26 letters and 36 pairs of letters, so that strings may end inside a token."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(first, second) for first in "aeiouy" for second in "lmnrst"]
    tokens = ["<pad>", "<s>", *letters, *(first + second for first, second in pairs)]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


class NormedEmbedding(torch.nn.Embedding):
    """An embedding with a norm that the drafter's noise block does without, as Muse has it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.embed_norm = torch.nn.LayerNorm(args[1])

    def forward(self, ids):
        return self.embed_norm(super().forward(ids))
