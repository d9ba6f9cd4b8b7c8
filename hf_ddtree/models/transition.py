"""A low-rank transition between neighbouring depths: what a draft's parent token says about the draft.

A block-diffusion drafter predicts every position of its block without knowing which token the position before it got.
This term adds that: a change of the drafter's state, made from the state and the parent's embedding through a narrow
middle, so that it can be had for every pair of candidates without another pass through the layers. A relative, an MLP
in place of another pass: TreeFlash, https://arxiv.org/abs/2606.03819.
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class Transition(nn.Module):
    """`state + Transition(state, parent)` goes through the target's head in place of `state`.

    Starts as zero: an untrained one changes nothing.

    Args:
        hidden_size: of the drafter and of the target's embeddings.
        rank: width of the middle.
        eps: of the two norms.
    """

    def __init__(self, hidden_size: int, rank: int, eps: float):
        super().__init__()
        self.state_norm = Qwen3RMSNorm(hidden_size, eps=eps)
        self.parent_norm = Qwen3RMSNorm(hidden_size, eps=eps)
        self.state_proj = nn.Linear(hidden_size, rank)
        self.parent_proj = nn.Linear(hidden_size, rank, bias=False)
        self.up_proj = nn.Linear(rank, hidden_size, bias=False)

    def forward(self, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """The change of `states` [..., hidden] after parents of embeddings [..., hidden]; the two broadcast."""
        return self.up_proj(nn.functional.silu(self.of_state(states) + self.of_parent(parents)))

    def of_state(self, states: torch.Tensor) -> torch.Tensor:
        """[..., rank] what a state brings into the middle."""
        return self.state_proj(self.state_norm(states))

    def of_parent(self, parents: torch.Tensor) -> torch.Tensor:
        """[..., rank] what a parent of these embeddings brings into the middle."""
        return self.parent_proj(self.parent_norm(parents))
