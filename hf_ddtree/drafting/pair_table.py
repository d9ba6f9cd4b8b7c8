"""The drafter's transition by tokens: what it adds for a pair of them is a product of two rows, each made once."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from ..fingerprint import fingerprint
from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.head import is_plain_linear, logit_scale, logit_softcap

# Given states [n, 1, hidden], parents [n, k] and children [n, k]: what is added to the children's logits, [n, k, k].
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TABLES: "WeakKeyDictionary[DFlashDraftModel, tuple[tuple, PairTable]]" = WeakKeyDictionary()
FILLED = 32  # tokens are learnt in multiples of so many


class PairTable:
    """Rows of the tokens that have been candidates: their part in the transition's middle, and what they read of it.

    head[child] @ up @ silu(middle of state + middle of parent): `before` holds the middle of a parent, `after` holds
    head[child] @ up. Most candidates of a round were candidates before, and the two products are most of what a
    transition costs on a CPU: 2.0 ms a round without this, 0.7 ms with it (64 candidates, rank 256, hidden size 576,
    one core of an AMD EPYC). Memory is taken for the tokens that come up: 4 x rank bytes each in bfloat16.

    Args:
        drafter: with a transition.
        target: whose embeddings and head make the rows; `can_tabulate` must hold.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel):
        weight = target.get_output_embeddings().weight
        shape = len(weight), drafter.config.transition_rank
        with torch.inference_mode(False):  # it is written to in calls to come
            self.known = torch.zeros(len(weight), dtype=torch.bool)
            self.before, self.after = (torch.empty(shape, dtype=drafter.dtype) for _ in range(2))  # untouched till used

    @classmethod
    def of(cls, drafter: DFlashDraftModel, target: PreTrainedModel) -> "PairTable":
        """The one kept for these models, as long as their weights stay what they are."""
        assert drafter.transition is not None
        embeds, head = target.get_input_embeddings(), target.get_output_embeddings()
        weights = fingerprint((*drafter.transition.parameters(), *embeds.parameters(), *head.parameters()))
        kept = TABLES.get(drafter)
        if kept is None or kept[0] != weights:
            kept = TABLES[drafter] = weights, cls(drafter, target)
        return kept[1]

    def learn(self, drafter: DFlashDraftModel, target: PreTrainedModel, tokens: torch.Tensor) -> None:
        """Makes the rows of those of `tokens` that have none yet."""
        new = tokens[~self.known[tokens]].unique()
        if not len(new):
            return
        # Filled up with the first of them: a product of a new shape makes the CPU's library compile a kernel, 1 ms.
        new = torch.cat([new, new[:1].expand(-len(new) % FILLED)])
        transition = drafter.transition
        assert transition is not None
        embeds, head = target.get_input_embeddings(), target.get_output_embeddings()
        last = getattr(embeds, "num_embeddings", len(self.known)) - 1  # a padded head may have more rows
        embeddings = noise_embeddings(embeds, new.clamp(max=last)).to(self.before.dtype)
        after = head.weight[new].to(self.after.dtype) @ transition.up_proj.weight
        self.before[new] = transition.of_parent(embeddings).to(self.before.dtype)
        self.after[new] = after.to(self.after.dtype)  # autocast, in training, has dtypes of its own
        self.known[new] = True

    def change(self, middle: torch.Tensor, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        """[n, k, k] float32: what is added to `children` [n, k] after `parents` [n, k], up to the head's scale.

        Args:
            middle: [n, 1, rank] of the states.
        """
        # `embedding` copies rows in a fifth of the time that indexing takes.
        after = embedding(children, self.after)  # [n, k, rank]
        return (silu(middle + embedding(parents, self.before)) @ after.transpose(1, 2)).float()


def tabulated_logits(drafter: DFlashDraftModel, target: PreTrainedModel) -> Change:
    """The transition of these models, by their table."""
    table, scale = PairTable.of(drafter, target), logit_scale(target.config)

    def change(states: torch.Tensor, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        assert drafter.transition is not None
        table.learn(drafter, target, torch.cat([parents, children]))
        return table.change(drafter.transition.of_state(states[:, 0])[:, None], parents, children) * scale

    return change


def can_tabulate(drafter: DFlashDraftModel, target: PreTrainedModel) -> bool:
    """Whether the models are on the CPU, and what is added to a logit is linear in the head's row, which may be read.

    On an accelerator the products cost less than finding out which tokens are new.
    """
    head = target.get_output_embeddings()
    return (
        drafter.transition is not None
        and is_plain_linear(head)
        and is_plain_linear(drafter.transition.up_proj)
        and head.weight.device.type == drafter.device.type == "cpu"
        and logit_softcap(target.config) is None
    )
