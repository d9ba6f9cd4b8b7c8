"""The DFlash training objective: random anchors, block-diagonal attention, early positions weighted.

Source: https://arxiv.org/abs/2602.06036, section 4. Distillation to the target's distribution is added to it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..models.dflash import DFlashDraftModel, noise_embeddings
from .data import TargetFeatures


@dataclass(frozen=True)
class BlockBatch:
    """`blocks` noise blocks over each of `rows` sequences, in one drafter forward.

    Attributes:
        noise_ids: [rows, blocks * block_size] anchor token, then mask tokens.
        context: [rows, length, taps * hidden].
        attention_mask: [rows, 1, blocks * block_size, length + blocks * block_size] bool, True = visible: the context
            before the block's anchor, and the block itself.
        position_ids: [rows, length + blocks * block_size].
        labels: [rows, blocks, block_size - 1] the tokens after the anchor; -100 past the end of the sequence.
        final: [rows, blocks, block_size - 1, hidden] the target's state that predicts each label.
    """

    noise_ids: torch.Tensor
    context: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    final: torch.Tensor


def build_batch(
    features: list[TargetFeatures], anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> BlockBatch:
    """Lays noise blocks at `anchors` [rows, blocks] (indices of the anchor tokens) over the sequences."""
    pad = nn.utils.rnn.pad_sequence
    tokens = pad([f.sequence.tokens for f in features], batch_first=True, padding_value=-100)
    context = pad([f.context for f in features], batch_first=True)
    final = pad([f.final for f in features], batch_first=True)
    rows, length = tokens.shape
    blocks = anchors.shape[1]

    slots = anchors[:, :, None] + torch.arange(block_size)  # [rows, blocks, block] absolute positions
    noise_ids = torch.full((rows, blocks, block_size), mask_token_id)
    noise_ids[:, :, 0] = tokens.gather(1, anchors)

    future = slots[:, :, 1:]
    inside = future < length
    flat = future.clamp(max=length - 1).flatten(1)
    labels = tokens.gather(1, flat).view_as(future).masked_fill(~inside, -100)
    predictors = (flat - 1)[..., None].expand(-1, -1, final.shape[-1])

    before_anchor = torch.arange(length) < anchors[:, :, None]  # [rows, blocks, length]
    before_anchor = before_anchor.repeat_interleave(block_size, dim=1)
    block_of = torch.arange(blocks).repeat_interleave(block_size)
    same_block = (block_of[:, None] == block_of).expand(rows, -1, -1)
    return BlockBatch(
        noise_ids=noise_ids.flatten(1),
        context=context,
        attention_mask=torch.cat([before_anchor, same_block], dim=-1)[:, None],
        position_ids=torch.cat([torch.arange(length).expand(rows, -1), slots.flatten(1)], dim=1),
        labels=labels,
        final=final.gather(1, predictors).view(*labels.shape, -1),
    )


def draft_hidden_states(drafter: DFlashDraftModel, embedding: nn.Module, batch: BlockBatch) -> torch.Tensor:
    """[rows, blocks, block_size - 1, hidden]: the drafter's states that go through the target's head."""
    hidden = drafter(
        noise_embeds=noise_embeddings(embedding, batch.noise_ids),
        context_hidden_states=batch.context,
        attention_mask=dict.fromkeys(drafter.config.layer_types, batch.attention_mask),
        position_ids=batch.position_ids,
    ).last_hidden_state
    rows, blocks = batch.labels.shape[:2]
    return hidden.view(rows, blocks, -1, hidden.shape[-1])[:, :, 1:]


class RestrictedHead:
    """The target's head cut to the tokens that occur in the data, to make the loss affordable on a CPU.

    Args:
        weight: [vocab, hidden] the target's head.
        token_ids: the tokens kept.
    """

    def __init__(self, weight: torch.Tensor, token_ids: torch.Tensor):
        self.weight = weight.detach()[token_ids]
        self.column = torch.full((weight.shape[0],), -1)
        self.column[token_ids] = torch.arange(len(token_ids))


class _HeadCrossEntropy(torch.autograd.Function):
    """Head, softmax and cross entropy in one pass over row chunks that stay in the processor's cache.

    The gradient with respect to the hidden states is found on the way, so no [rows, vocab] tensor is ever kept
    (12 x 32 blocks on 2 cores of an EPYC: loss and its backward 1.7 s as separate operations, 0.6 s like this).
    """

    CHUNK = 128

    @staticmethod
    def forward(ctx, hidden, final, head_weight, labels_and_weights, distillation):
        labels, row_weights = labels_and_weights
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32)
        for rows in torch.arange(len(hidden)).split(_HeadCrossEntropy.CHUNK):
            wanted = (final[rows] @ head_weight.T).float().softmax(dim=-1).mul_(distillation)
            wanted.scatter_add_(1, labels[rows, None], wanted.new_full((len(rows), 1), 1 - distillation))
            logits = (hidden[rows] @ head_weight.T).float()
            log_total = logits.logsumexp(dim=-1, keepdim=True)
            row_losses = log_total.squeeze(1) - (wanted * logits).sum(dim=-1)
            loss += (row_losses * row_weights[rows]).sum()
            excess = (logits - log_total).exp_().sub_(wanted).mul_(row_weights[rows, None])
            gradient[rows] = excess.to(head_weight.dtype) @ head_weight
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


def block_loss(
    hidden: torch.Tensor, batch: BlockBatch, head: RestrictedHead, distillation: float, decay: float
) -> torch.Tensor:
    """Cross entropy against `distillation` of the target's distribution plus the rest of the label itself.

    Position k after the anchor weighs `exp(-(k - 1) / decay)`: a miss there makes all later ones worthless.

    Args:
        hidden: [rows, blocks, block_size - 1, hidden] as `draft_hidden_states` gives it.
    """
    labels = torch.where(batch.labels >= 0, head.column[batch.labels.clamp(min=0)], -1)
    known = labels >= 0
    depths = torch.arange(labels.shape[-1]).expand_as(labels)[known]
    weights = torch.exp(-depths / decay)
    dtype = head.weight.dtype
    return _HeadCrossEntropy.apply(
        hidden[known].to(dtype),
        batch.final[known].to(dtype),
        head.weight,
        (labels[known], weights / weights.sum()),
        distillation,
    )
