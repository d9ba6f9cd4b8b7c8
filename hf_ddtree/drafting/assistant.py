"""Drafts with any causal LM: trees grown level by level from its own distributions, each level one forward of it."""

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from ..attention import TreeMasks
from ..cache import cache_name
from ..configuration import DDTreeConfig
from ..target import check_target
from ..tree import Tree, root_tree
from ..tree_cache import TreeCache, TreeLayer
from .drafter import Drafter, Request, device_of

DEPTH = 5  # levels, unless `draft_block_size` says otherwise: each is a forward of the assistant
CHUNK = 512  # tokens of a long prompt that go through the assistant at once; bounds the mask's size
UNLIKE_VOCABULARIES = 1024  # rows; embeddings are padded by fewer (128 between Qwen2.5 models of 0.5B and 72B)


@dataclass
class Pool:
    """The best nodes so far, best first, the root left out.

    Attributes:
        tokens, depths: [rows, nodes] int64.
        parents: [rows, nodes] int64 places in the pool; -1 = the root.
        scores: [rows, nodes] float64 log-probabilities of the paths.
        sees: [rows, nodes, fed] bool, which of the nodes fed to the assistant are ancestors.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    sees: torch.Tensor

    def best(self, count: int) -> "Pool":
        """The `count` best; ancestors of one that is kept are kept, since they score no less and come first."""
        order = self.scores.argsort(dim=1, descending=True, stable=True)[:, :count]
        new_place = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.full_like(self.tokens, -1).scatter_(1, order, new_place)
        parents = self.parents.gather(1, order)
        parents = torch.where(parents >= 0, place.gather(1, parents.clamp(min=0)), -1)
        sees = self.sees.gather(1, order[..., None].expand(-1, -1, self.sees.shape[2]))
        return Pool(
            self.tokens.gather(1, order), self.depths.gather(1, order), parents, self.scores.gather(1, order), sees
        )


class Frontier(NamedTuple):
    """Nodes of a pool to feed to the assistant.

    Attributes:
        nodes: [rows, n] places in the pool. real: [rows, n] bool; the rest fills rows that have fewer.
    """

    nodes: torch.Tensor
    real: torch.Tensor

    @classmethod
    def at(cls, pool: Pool, depth: int) -> "Frontier | None":
        """The pool's nodes of a depth; None if there are none."""
        wanted = (pool.depths == depth) & (pool.scores > -torch.inf)
        width = int(wanted.sum(1).max())
        nodes = wanted.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        return cls(nodes, wanted.gather(1, nodes)) if width else None

    def of(self, field: torch.Tensor) -> torch.Tensor:
        """The nodes' entries in a field of the pool, [rows, nodes] or [rows, nodes, n]."""
        if field.dim() == 2:
            return field.gather(1, self.nodes)
        return field.gather(1, self.nodes[..., None].expand(-1, -1, field.shape[2]))


class AssistantDrafter(Drafter):
    """The most probable continuations under an assistant model, up to a depth.

    The assistant keeps each committed token in its cache. A level feeds it, under a tree mask, the nodes of one depth
    that are among the best found so far; one that is not can't become so, so the tree is the exact best-first one.

    Args:
        assistant: a causal LM with the target's token ids; padding rows of either vocabulary do not matter.
        target: whose vocabulary bounds the drafts.
        config: budget, depth (`draft_block_size` less one) and temperature.
        rows: of the batch.

    Raises:
        ValueError: trees can't be grown on the assistant, or its vocabulary is another.
    """

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel, config: DDTreeConfig, rows: int):
        check_assistant(assistant, target)
        self.assistant, self.config, self.rows = assistant, config, rows
        self.depth = config.draft_block_size - 1 if config.draft_block_size else DEPTH
        self.masks, self.cache_name = TreeMasks(assistant), cache_name(assistant)
        windows = [self.masks.window if kind == "sliding_attention" else None for kind in self.masks.types]
        self.cache = Cache(layers=[TreeLayer(window) for window in windows])
        self.trees = TreeCache(self.cache.layers, rows)
        self.vocab_size = min(vocabulary(assistant), vocabulary(target))
        self.positions = table_of_positions(assistant)
        takes = inspect.signature(assistant.forward).parameters
        self.options = {"output_router_logits": False} if "output_router_logits" in takes else {}
        self.keeps_logits = "logits_to_keep" in takes

    def keep(self, rows: list[int]) -> None:
        """Goes on with those rows."""
        self.trees.drop_others(rows)
        self.masks.forget()

    @torch.no_grad()
    def draft(self, request: Request) -> Tree | None:
        """One forward for what was committed, and one for each deeper level; None where no depth is left.

        Raises:
            ValueError: the text is longer than the assistant's table of positions. Past its end an accelerator would
                not raise an error but abort, and take the target with it.
        """
        depth, budget = min(self.depth, request.max_depth), request.budget
        if depth < 1:
            return None
        if self.positions is not None:
            length = max(map(len, request.texts))
            if length > self.positions:
                name = type(self.assistant).__name__
                raise ValueError(f"{name} has {self.positions} positions, too few for a text of {length} tokens")
            depth = min(depth, self.positions - length + 1)
        roots = request.roots
        device = device_of(self.assistant, roots.device)
        try:
            logits = self._read(request.texts)[:, None]  # [rows, 1, vocab]
            noise = request.noise(depth, logits.expand(-1, depth, -1).to(roots.device))
            pool = _children_of_root(self._scaled(logits, noise, 0), budget)
            fed = torch.empty(len(roots), 0, dtype=torch.int64, device=device)  # depths of the nodes fed
            for level in range(1, depth):
                if (frontier := Frontier.at(pool, level)) is None:
                    break
                logits, fed = self._feed(pool, frontier, fed)
                pool = _with_children(pool, frontier, self._scaled(logits, noise, level), budget).best(budget)
        finally:
            self.trees.rollback()
        root = root_tree(roots)
        below = (pool.tokens, pool.parents + 1, pool.depths, pool.scores)
        above = (root.tokens, root.parents, root.depths, root.scores)
        fields = (torch.cat([first, rest.to(first.device)], dim=1) for first, rest in zip(above, below, strict=True))
        return Tree(*fields, depth_bound=depth)

    def _scaled(self, logits: torch.Tensor, noise: torch.Tensor | None, level: int) -> torch.Tensor:
        """[rows, n, vocab] log-probabilities that the tree is made of; -inf where there is a NaN."""
        if noise is not None:
            logits = logits + noise[:, level, None].to(logits.device)
        return (logits / self.config.tree_temperature).log_softmax(-1).nan_to_num(nan=-torch.inf).clamp(max=0.0)

    def _read(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Commits to the cache what is new in the texts; logits [rows, vocab] after them."""
        new = [text[end:] for text, end in zip(texts, self.trees.ends.tolist(), strict=True)]
        longest = max(map(len, new))
        rows = [torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in new]  # all end in the last column
        tokens = torch.stack(rows).to(device_of(self.assistant, texts[0].device))
        padding = torch.tensor([longest - len(ids) for ids in new], device=tokens.device)[:, None]
        for start in range(0, longest, CHUNK):
            column = torch.arange(start, min(start + CHUNK, longest), device=tokens.device)
            real = column >= padding  # [rows, columns]
            ends = self.trees.ends.to(tokens.device)[:, None]
            places = ends + (column - torch.maximum(padding, column[:1])).clamp(min=0)
            # A padded query sees itself, since a row of a mask must not be empty.
            causal = column[:, None] >= column
            appended = (causal & real[:, None]) | torch.eye(len(column), dtype=torch.bool, device=tokens.device)
            logits = self._forward(tokens[:, column], places, appended, kept=1)[:, -1]
            self.trees.commit([each.nonzero()[:, 0].tolist() for each in real])
        return logits[:, : self.vocab_size].float()

    def _feed(self, pool: Pool, frontier: Frontier, fed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One level of nodes.

        Args:
            fed: [rows, n] depths of the nodes fed before.

        Returns:
            Logits [rows, frontier, vocab] after the nodes, and `fed` with them.
        """
        tokens, width = frontier.of(pool.tokens), frontier.nodes.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        appended = torch.cat([frontier.of(pool.sees), own], dim=2)
        fed = torch.cat([fed, frontier.of(pool.depths)], dim=1)
        places = self.trees.ends.to(tokens.device)[:, None] - 1 + fed  # the root is the last committed token
        logits = self._forward(tokens, places, appended, kept=width)
        place = torch.arange(pool.tokens.shape[1], device=tokens.device)[:, None]
        is_node = (place == frontier.nodes[:, None]) & frontier.real[:, None]  # [rows, pool, frontier]
        pool.sees = torch.cat([pool.sees, is_node], dim=2)
        return logits.float(), fed

    def _forward(self, tokens: torch.Tensor, places: torch.Tensor, appended: torch.Tensor, kept: int) -> torch.Tensor:
        """Logits [rows, kept, vocab] of the last of `tokens` [rows, n], which come after all that was appended before.

        Args:
            places, appended: as in `slot_mask`.
        """
        self.trees.plan(tokens.shape[1])
        known = self.assistant.get_input_embeddings().num_embeddings
        outputs = self.assistant(
            input_ids=tokens.clamp(max=known - 1),
            attention_mask=self.masks.write(self.trees, None, appended, places),
            position_ids=places[:, -tokens.shape[1] :],
            use_cache=True,
            return_dict=True,
            **{self.cache_name: self.cache},
            **({"logits_to_keep": kept} if self.keeps_logits else {}),
            **self.options,
        )
        return outputs.logits[:, -kept:, : self.vocab_size]


def _children_of_root(log_probs: torch.Tensor, budget: int) -> Pool:
    """The best first tokens; `log_probs` [rows, 1, vocab]."""
    scores, tokens = log_probs[:, 0].topk(min(budget, log_probs.shape[-1]), dim=-1)
    ones = torch.ones_like(tokens)
    return Pool(tokens, ones, -ones, scores.double(), tokens.new_zeros(*tokens.shape, 0, dtype=torch.bool))


def _with_children(pool: Pool, frontier: Frontier, log_probs: torch.Tensor, budget: int) -> Pool:
    """The pool and the best children of its nodes `frontier`; `log_probs` [rows, frontier, vocab]."""
    best, tokens = log_probs.topk(min(budget, log_probs.shape[-1]), dim=-1)
    children = tokens.shape[2]
    scores = frontier.of(pool.scores)[..., None] + best.double()
    scores = torch.where(frontier.real[..., None], scores, -torch.inf)
    return Pool(
        torch.cat([pool.tokens, tokens.flatten(1)], dim=1),
        torch.cat([pool.depths, frontier.of(pool.depths).repeat_interleave(children, dim=1) + 1], dim=1),
        torch.cat([pool.parents, frontier.nodes.repeat_interleave(children, dim=1)], dim=1),
        torch.cat([pool.scores, scores.flatten(1)], dim=1),
        torch.cat([pool.sees, frontier.of(pool.sees).repeat_interleave(children, dim=1)], dim=1),
    )


def vocabulary(model: PreTrainedModel) -> int:
    """Rows of a model's vocabulary."""
    return model.config.get_text_config(decoder=True).vocab_size


def table_of_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has that looks them up in a table, as GPT-2, OPT and GPT-J do; None = no table."""
    decoder = model.get_decoder() or model
    tables = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Embedding)]
    tables += [name for name, buffer in decoder.named_buffers() if buffer.dim() == 2]
    if not any("pos" in name or "wpe" in name for name in tables):
        return None
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_assistant(assistant: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises ValueError where an assistant's trees would be wrong or its tokens mean something else."""
    if assistant.get_output_embeddings() is None:
        raise ValueError(
            f"`assistant_model` is {type(assistant).__name__}, which has no output head; pass a causal LM, or a DFlash "
            "drafter loaded with `hf_ddtree.DFlashDraftModel.from_pretrained(...)`."
        )
    try:
        check_target(assistant)
    except ValueError as error:
        raise ValueError(f"`assistant_model` can't draft trees: {error}") from error
    ours, theirs = vocabulary(assistant), vocabulary(target)
    if abs(ours - theirs) > UNLIKE_VOCABULARIES:
        raise ValueError(
            f"`assistant_model` has a vocabulary of {ours} tokens and the target one of {theirs}: more than padding "
            "explains, so the tokenizers differ. Use an assistant with the target's tokenizer."
        )
