"""Sources of path-conditional corrections: the drafter's own transition, a table of bigrams, the running text.

Each is a function of parents [rows, depth, k] and children [rows, depth, k], both int64, to what is added to the
children's draft logits, [rows, depth, k, k] float32 (`Correction` in draft.py).
"""

from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.head import capped, head_logits, is_plain_linear, logit_scale, logit_softcap
from .draft import Correction
from .pair_table import Change, can_tabulate, tabulated_logits
from .running_text import running_text_correction


class Corrections:
    """The sources that a config asks for.

    Args:
        drafter: whose transition is used, if it has one.
        target: gives the embeddings of parents and the head's rows of children.
        config: which sources, and their weights.

    Raises:
        ValueError: the table can't be read.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, config: DDTreeConfig):
        self.drafter, self.target, self.config = drafter, target, config
        self.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.change: Change = partial(transition_logits, drafter, target)
        if can_tabulate(drafter, target):
            self.change = tabulated_logits(drafter, target)
        self.table = None if config.draft_table is None else BigramTable.load(config.draft_table, self.vocab_size)

    def __call__(self, texts: list[torch.Tensor], states: torch.Tensor) -> tuple[Correction, ...]:
        """Corrections of a draft.

        Args:
            texts: per row [length] the text so far, the root last.
            states: [rows, depth, hidden] the drafter's states, one per depth.
        """
        config = self.config
        if config.tree_shape == "chain" or config.acceptance != "walk":  # they have no use for it
            return ()
        sources: list[Correction] = []
        if self.drafter.transition is not None and config.draft_transition is not False:
            sources.append(partial(_transition, self.change, states))
        if self.table is not None:
            sources.append(self.table.correction(config.draft_table_weight))
        if config.draft_text_weight:
            sources.append(running_text_correction(texts, config.draft_text_weight))
        return tuple(sources)


def _transition(
    change: Change,
    states: torch.Tensor,
    parents: torch.Tensor,
    children: torch.Tensor,
) -> torch.Tensor:
    rows, depth, k = children.shape
    correction = torch.zeros(rows, depth, k, k, device=children.device)
    if depth < 2:  # the root, parent of the first depth, is in the noise block: the drafter knows it
        return correction
    states = states[:, 1:depth].flatten(0, 1)[:, None]  # [rows * (depth - 1), 1, hidden]
    changed = change(states, parents[:, 1:].flatten(0, 1), children[:, 1:].flatten(0, 1))
    correction[:, 1:] = changed.view(rows, depth - 1, k, k)
    return correction


def transition_logits(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    states: torch.Tensor,
    parents: torch.Tensor,
    children: torch.Tensor,
) -> torch.Tensor:
    """[n, k, k] float32: what is added to the logits of `children` [n, k] after `parents` [n, k] at `states` [n, 1, h].

    `tabulated_logits` gives the same up to rounding, where it can.
    """
    assert drafter.transition is not None
    embedding = target.get_input_embeddings()
    known = getattr(embedding, "num_embeddings", target.config.get_text_config(decoder=True).vocab_size)
    embeddings = noise_embeddings(embedding, parents.clamp(max=known - 1))  # a padded head may have more rows
    change = drafter.transition(states, embeddings.to(states.device, states.dtype))
    return logits_of_change(target, states, change, children)


def logits_of_change(
    target: PreTrainedModel, states: torch.Tensor, change: torch.Tensor, children: torch.Tensor
) -> torch.Tensor:
    """[depth, k, children] float32: what `change` adds to the logits of `children`.

    Args:
        states: [depth, 1, hidden]. change: [depth, k, hidden]. children: [depth, children] token ids.
    """
    head = target.get_output_embeddings()
    if not is_plain_linear(head):
        return _called_logits(target, states + change, children) - _called_logits(target, states, children)
    place = children.to(head.weight.device)
    rows = head.weight[place].to(change.device, change.dtype).transpose(1, 2)  # [depth, hidden, children]
    scale, softcap = logit_scale(target.config), logit_softcap(target.config)
    added = (change @ rows).float() * scale
    if softcap is not None:
        bias = 0.0 if head.bias is None else head.bias[place][:, None].to(change.device).float()
        plain = ((states @ rows).float() + bias) * scale
        added = capped(plain + added, softcap) - capped(plain, softcap)
    return added.to(children.device)


def _called_logits(target: PreTrainedModel, states: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
    """The same of quantised and sharded heads, which can only be called: the whole vocabulary, then the children's."""
    flat = states.flatten(0, 1).to(children.device, target.dtype)
    whole = head_logits(target, flat).float().view(*states.shape[:2], -1).to(children.device)
    return whole.gather(2, children[:, None].expand(-1, states.shape[1], -1))


class BigramTable:
    """Pointwise mutual information of neighbouring tokens: log P(child | parent) - log P(child), smoothed.

    Made by `hf-ddtree table`; works with any drafter. P(child | parent) = (pairs + m P(child)) / (parents + m), the
    Dirichlet prior of language modelling (Zhai and Lafferty, 2004), so an unseen pair costs log((parents + m) / m).

    Attributes:
        keys: [pairs] int64, parent * vocab + child, ascending.
        values: [pairs] float32, of the pairs seen.
        parents: [rows] int64, ascending. unseen: [rows] float32, of pairs not seen after each of them.
        vocab_size: of the target.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, parents: torch.Tensor, unseen: torch.Tensor, vocab_size: int
    ):
        self.keys, self.values, self.parents, self.unseen = keys, values, parents, unseen
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> "BigramTable":
        """Reads a table.

        Raises:
            ValueError: no such file, not a bigram table, or of another vocabulary.
        """
        try:
            with safe_open(path, "pt") as file:
                other = int(file.metadata()["vocab_size"])
                tensors = {name: file.get_tensor(name) for name in ("keys", "values", "parents", "unseen")}
            _check_pairs(tensors["keys"], tensors["values"], other**2)
            _check_pairs(tensors["parents"], tensors["unseen"], other)
        except Exception as error:
            raise ValueError(
                f"`draft_table` is {str(path)!r}, no bigram table ({error!r}); make one with `hf-ddtree table`."
            ) from error
        if other != vocab_size:
            raise ValueError(
                f"`draft_table` {str(path)!r} is of a vocabulary of {other} tokens and the target's has {vocab_size}; "
                "make one for this target with `hf-ddtree table`."
            )
        values = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        return cls(**{**tensors, **values}, vocab_size=vocab_size)

    def correction(self, weight: float) -> Correction:
        """The table's values times `weight`."""
        return lambda parents, children: weight * self.lookup(parents, children)

    def lookup(self, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        """[..., k, children]: the values of all pairs; 0 after a parent that the text did not have."""
        self._move(children.device)
        pairs = parents[..., :, None] * self.vocab_size + children[..., None, :]
        found, place = _find(self.keys, pairs)
        known, row = _find(self.parents, parents)
        unseen = torch.where(known, self.unseen[row], 0.0)[..., None]
        return torch.where(found, self.values[place], unseen)

    def _move(self, device: torch.device) -> None:
        if self.keys.device != device:
            for name in ("keys", "values", "parents", "unseen"):
                setattr(self, name, getattr(self, name).to(device))


def _check_pairs(ids: torch.Tensor, values: torch.Tensor, limit: int) -> None:
    """Raises ValueError unless `ids` are ascending and below `limit`, with a finite value each."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids) or not (ids.diff() > 0).all():
        raise ValueError(f"ids are {ids.dtype} of shape {list(ids.shape)}; they must be ascending int64, at least one")
    if ids[0] < 0 or ids[-1] >= limit:
        raise ValueError(f"ids go from {int(ids[0])} to {int(ids[-1])}; they must be in 0..{limit - 1}")
    if values.shape != ids.shape or not values.is_floating_point() or not values.isfinite().all():
        raise ValueError(f"{list(values.shape)} values for {list(ids.shape)} ids; each must have one, finite")


def _find(ordered: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each of `wanted` is in `ordered` [n], and where."""
    place = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
    return ordered[place] == wanted, place
