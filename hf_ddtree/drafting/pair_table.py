"""The drafter's transition by tokens: what it adds for a pair of them is a product of two rows, each made once."""

import torch
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.head import is_plain_linear, logit_scale, logit_softcap

FILLED = 32  # tokens are learnt in multiples of so many


class PairTable:
    """Rows of the tokens that have been candidates: their part in the transition's middle, and what they read of it.

    head[child] @ up @ silu(middle of state + middle of parent): `before` holds the middle of a parent, `after` holds
    head[child] @ up. Two in three candidates of a round were candidates before, and the two products are most of what
    a transition costs on a CPU: 2.0 ms a round without this, 1.1 ms with it (64 candidates, rank 256, hidden size 576,
    one core of an AMD EPYC). Memory is taken for the tokens that come up: 4 x rank bytes each in bfloat16.

    Args:
        drafter: with a transition. Its weights must not change while the table is in use.
        target: whose embeddings and head make the rows; `can_tabulate` must hold.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel):
        self.drafter, self.target = drafter, target
        self.scale = logit_scale(target.config)
        weight = target.get_output_embeddings().weight
        shape = len(weight), drafter.config.transition_rank
        self.known = torch.zeros(len(weight), dtype=torch.bool)
        self.before, self.after = (torch.empty(shape, dtype=drafter.dtype) for _ in range(2))  # untouched till used

    def __call__(self, states: torch.Tensor, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        """[n, k, k] float32: what is added to the logits of `children` [n, k] after `parents` [n, k] at `states`.

        Args:
            states: [n, 1, hidden].
        """
        self._learn(torch.cat([parents, children]))
        assert self.drafter.transition is not None
        # `embedding` copies rows in a fifth of the time that indexing takes.
        middle = self.drafter.transition.of_state(states[:, 0])[:, None] + embedding(parents, self.before)
        after = embedding(children, self.after)  # [n, k, rank]
        return (silu(middle) @ after.transpose(1, 2)).float() * self.scale

    def _learn(self, tokens: torch.Tensor) -> None:
        new = tokens[~self.known[tokens]].unique()
        if not len(new):
            return
        # Filled up with the first of them: a product of a new shape makes the CPU's library compile a kernel, 1 ms.
        new = torch.cat([new, new[:1].expand(-len(new) % FILLED)])
        transition = self.drafter.transition
        assert transition is not None
        embeds, head = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        last = getattr(embeds, "num_embeddings", len(self.known)) - 1  # a padded head may have more rows
        embeddings = noise_embeddings(embeds, new.clamp(max=last)).to(self.before.dtype)
        self.before[new] = transition.of_parent(embeddings).to(self.before.dtype)
        after = head.weight[new].to(self.after.dtype) @ transition.up_proj.weight
        self.after[new] = after.to(self.after.dtype)  # autocast, in training, has dtypes of its own
        self.known[new] = True


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
